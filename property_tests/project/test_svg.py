"""Draft trees as SVG: well formed, apart, escaped, and with what was left out told."""

import itertools
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from ddtree import build_tree, chain_tree
from ddtree.drafters import NgramDrafter
from ddtree.engine import Engine, ScriptedTarget
from ddtree.property_tests.project.test_figures import random_tree, small_tree
from ddtree.svg import MOST_NODES, MOST_TREES, tree_layout, tree_svg
from ddtree.trees import tree_from_parents

SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg):
    """Boxes (left, top, right, bottom) and texts of the nodes, and whether each is marked as kept."""
    nodes = [g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
    boxes, texts, marks = [], [], []
    for node in nodes:
        rect, text = node.find(f"{SVG}rect"), node.find(f"{SVG}text")
        assert rect is not None
        assert text is not None
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        boxes.append((x, y, x + width, y + height))
        texts.append(text.text)
        marks.append(rect.attrib.get("class", ""))
    return boxes, texts, marks


@pytest.mark.parametrize("n", [1, 2, 17, 64])
def test_layout_keeps_nodes_apart(n):
    for seed in range(25):
        tree = random_tree(seed, n)
        places = tree_layout(tree.parents[0])
        assert places[:, 0].tolist() == tree.depths[0].tolist()
        for column in range(int(places[:, 0].max()) + 1):
            rows = np.sort(places[places[:, 0] == column, 1])
            assert (np.diff(rows) >= 1).all()
        parents, first = tree.parents[0].tolist(), 0
        while first in parents[1:]:  # first children run along the top
            first = parents.index(first, 1)
            assert places[first, 1] == 0


@pytest.mark.parametrize("seed, n", [(0, 1), (1, 64), (2, 300)])
def test_boxes_are_apart_inside_and_wide_enough(seed, n):
    svg = tree_svg(random_tree(seed, n), labels=lambda token: f"<{token}>")
    root = ET.fromstring(svg)
    boxes, texts, _ = drawn(svg)
    assert len(boxes) == n
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    order = sorted(range(n), key=lambda i: boxes[i][:2])
    for i, j in itertools.pairwise(order):  # columns from left to right, each from above
        a, b = boxes[i], boxes[j]
        assert a[2] <= b[0] or (a[0] == b[0] and a[3] <= b[1])
    for (left, top, right, bottom), text in zip(boxes, texts, strict=True):
        assert right - left >= 6.7 * len(text)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


def test_tokens_probabilities_and_the_path_are_told():
    svg = tree_svg(small_tree(), path=[0, 1, 3, -1])
    _, texts, marks = drawn(svg)
    assert texts == ["9", "1", "3", "4", "2"]
    assert marks == ["r", "k", "", "k", ""]
    titles = [title.text for title in ET.fromstring(svg).iter(f"{SVG}title")]
    assert titles[0] == "root: token 9"
    assert titles[3] == "node 3: token 4, rank 2, p 0.4, path 0.32"
    edges = [
        (float(p.attrib["stroke-width"]), p.attrib.get("class", "")) for p in ET.fromstring(svg).iter(f"{SVG}path")
    ]
    assert [mark for _, mark in edges] == ["", "", "k", "k"]  # what was accepted lies above
    assert edges[2][0] > edges[0][0] > edges[3][0] > edges[1][0]  # 0.8, 0.5, 0.4, 0.1


def test_labels_are_escaped_and_what_xml_cannot_hold_is_replaced():
    labels = {9: "<b>&\"'", 1: "\x00\x1b", 3: "\ud800", 4: "]]>", 2: "日本\U0001f600"}
    _, texts, _ = drawn(tree_svg(small_tree(), labels=lambda token: labels[token]))
    assert texts == ["<b>&\"'", "\ufffd\ufffd", "\ufffd", "]]>", "日本\U0001f600"]
    assert tree_svg(small_tree(), 0, labels=["a" * 40, *"bcde"]).count("aaaaaaaaaaa…") == 1


def test_a_notebook_shows_trees_and_rounds():
    text = b"the cat and the cat and the dog "
    run = Engine(ScriptedTarget([text] * 2, 256), NgramDrafter(), depth=3, budget=6).generate([text[:15]] * 2, 9)
    shown = run.rounds[0]
    trees, rounds = shown.tree._repr_svg_(), shown._repr_svg_()
    assert drawn(trees)[:2] == drawn(rounds)[:2]
    assert "k" not in drawn(trees)[2]
    kept = int(shown.acceptance.lengths.sum()) - 2  # roots not counted
    assert drawn(rounds)[2].count("k") == kept > 0
    assert "request 1" in trees
    assert "request" not in chain_tree([[1, 2]])._repr_svg_()


def test_a_page_of_other_drawings_keeps_its_style():
    style = next(ET.fromstring(tree_svg(small_tree())).iter(f"{SVG}style")).text
    assert style
    assert all(rule.startswith(".ddtree ") for rule in style.split("}") if rule)


def test_what_is_left_out_is_told():
    many = chain_tree(np.arange(MOST_NODES + 30)[None])
    assert len(drawn(tree_svg(many))[0]) == MOST_NODES
    assert "and 30 more nodes" in tree_svg(many)
    batch = chain_tree(np.zeros((MOST_TREES + 3, 2), np.int32))
    assert len(drawn(tree_svg(batch))[0]) == 2 * MOST_TREES
    assert "and 3 more requests" in tree_svg(batch)
    assert len(drawn(tree_svg(batch, MOST_TREES + 1))[0]) == 2
    empty = build_tree(np.zeros((0, 2, 1), np.float32), np.zeros((0, 2, 1), np.int32), np.zeros(0, np.int32), budget=2)
    assert "no requests" in empty._repr_svg_()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: tree_svg(t, 1), r"request must be in 0 … 0, got 1"),
        (lambda t: tree_svg(t, 0, path=[0, 5]), r"path must hold nodes 0 … 4, got 5"),
        (lambda t: tree_svg(t, path=[[0], [1]]), r"path must have a row a request, got 2"),
        (lambda t: tree_svg(t, 0, path=[[0], [1]]), r"path must have one row, got 2"),
        (lambda t: tree_svg(t, 0, labels=["a"]), r"labels must have one entry a node, 5, got 1"),
        (
            lambda t: tree_svg(t, labels=["a"] * 5),
            r"labels must be a function of a token id where no request is chosen",
        ),
        (lambda t: tree_layout([-1, 0, 2]), r"parents\[2\] must be an earlier node, got 2"),
        (lambda t: tree_layout([-1, -1]), r"parents\[1\] must be an earlier node, got -1"),
    ],
)
def test_what_a_tree_does_not_have_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(small_tree())


def test_unused_slots_are_not_drawn():
    tree = tree_from_parents(np.array([[1, 2, 3]]), np.array([[-1, 0, 0]]), np.array([2]))
    assert drawn(tree_svg(tree))[1] == ["1", "2"]
