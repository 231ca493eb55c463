"""The decoding engine, and a target that follows a known text."""

from ddtree.engine.engine import Engine, NonFiniteLogitsError
from ddtree.engine.records import STAGES, Emission, Generation, Round
from ddtree.engine.scripted import ScriptedTarget
from ddtree.engine.spread import FactoryFailedError, RequestsFailedError, generate_many, visible_devices

__all__ = [
    "STAGES",
    "Emission",
    "Engine",
    "FactoryFailedError",
    "Generation",
    "NonFiniteLogitsError",
    "RequestsFailedError",
    "Round",
    "ScriptedTarget",
    "generate_many",
    "visible_devices",
]
