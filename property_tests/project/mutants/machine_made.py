"""Mutants made by machine: cosmic-ray's operators, over every line that computes.

Of each place there is a change or two: the next number up and down, a comparison's boundary or its negation, the
operation undone, a loop not entered.
"""

import ast
from collections.abc import Iterator

import parso
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.number_replacer import NumberReplacer
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.zero_iteration_for_loop import ZeroIterationForLoop
from cosmic_ray.plugins import get_operator

from ddtree.property_tests.project.mutants import PACKAGE, Mutant, op_of, read

FILES = [
    *(f"reference/{path.name}" for path in sorted((PACKAGE / "reference").glob("[!_]*.py"))),
    # jit.py says how functions are compiled and spread over threads, which no result may show
    *(
        f"kernels/numba_cpu/{path.name}"
        for path in sorted((PACKAGE / "kernels/numba_cpu").glob("[!_]*.py"))
        if path.name != "jit.py"
    ),
]

OPERATORS = [
    *(
        f"ReplaceComparisonOperator_{change}"
        for change in (
            *("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt"),  # its negation would be caught where this is
            *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
        )
    ),
    *(
        f"ReplaceBinaryOperator_{change}"
        for change in (
            *("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Div_Mul", "Mod_FloorDiv", "Pow_Mul"),
            *("LShift_RShift", "RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr"),
        )
    ),
    *(f"ReplaceUnaryOperator_Delete_{operator}" for operator in ("USub", "Not", "Invert")),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
]


OPPOSITES = {"min": "max", "minimum": "maximum", "floor": "ceil", "argmin": "argmax"}
OPPOSITES |= {b: a for a, b in OPPOSITES.items()}


class NextNumber(NumberReplacer):  # type: ignore[misc]
    """As cosmic-ray's, but in the place of the number, to the blank."""

    def mutate(self, node, index):
        node.value = super().mutate(node, index).value.strip()
        return node


class LoopNotEntered(ZeroIterationForLoop):  # type: ignore[misc]
    """As cosmic-ray's, but with a loop that numba compiles."""

    def mutate(self, node, index):
        node.children[3] = parso.parse(" range(0)")
        return node


class OppositeFunction(Operator):  # type: ignore[misc]
    """The least for the greatest, and rounding the other way."""

    def mutation_positions(self, node):
        if node.type == "name" and node.value in OPPOSITES:
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        node.value = OPPOSITES[node.value]
        return node

    @classmethod
    def examples(cls):
        return ()


def mutants_of(file: str) -> Iterator[Mutant]:
    """Every mutant of a file that is not the same code but for its annotations and decorators."""
    source = read(file)
    seen = {meaning_of(source), ""}
    of_cosmic_ray = [get_operator(f"core/{name}")() for name in OPERATORS]
    for operator in [NextNumber(), *of_cosmic_ray, LoopNotEntered(), OppositeFunction()]:
        occurrence = 0
        while (changed := mutate_code(source, operator, occurrence)) is not None:
            occurrence += 1
            meaning = meaning_of(changed)
            if meaning not in seen:
                seen.add(meaning)
                yield Mutant(op_of(file), file, type(operator).__name__, changed, by_hand=False)


def meaning_of(source: str) -> str:
    """The code without what decides no result: annotations, decorators and grains; empty if it is none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns, node.decorator_list = None, []
        elif isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Name("Any")
        elif isinstance(node, ast.Call):  # how much work is worth a thread changes no result
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "grain"]
    return ast.dump(tree)
