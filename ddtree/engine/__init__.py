"""The decoding engine, and a target that follows a known text."""

from ddtree.engine.engine import Engine, NonFiniteLogitsError
from ddtree.engine.records import STAGES, Emission, Generation, Round
from ddtree.engine.scripted import ScriptedTarget

__all__ = ["STAGES", "Emission", "Engine", "Generation", "NonFiniteLogitsError", "Round", "ScriptedTarget"]
