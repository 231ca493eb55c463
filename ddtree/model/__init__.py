"""The target model: a DeepSeek-V3 transformer, its configuration and its files."""

from ddtree.model.checkpoint import golden_bundle, load_model, save_bundle
from ddtree.model.config import ModelConfig, Yarn
from ddtree.model.deepseek_v3 import DeepseekV3
from ddtree.model.random_weights import random_weights

__all__ = ["DeepseekV3", "ModelConfig", "Yarn", "golden_bundle", "load_model", "random_weights", "save_bundle"]
