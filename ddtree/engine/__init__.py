"""The decoding engine, and a target that follows a known text."""

from ddtree.engine.engine import Engine, NonFiniteLogitsError
from ddtree.engine.records import RESIDENT_STAGES, STAGES, Emission, Generation, Round
from ddtree.engine.scripted import ScriptedTarget
from ddtree.engine.spread import FactoryFailedError, RequestsFailedError, generate_many, visible_devices

__all__ = [
    "RESIDENT_STAGES",
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
