"""Small models, as flax linen modules.

Every factory returns a module to be called as
``module.apply(variables, inputs, train=..., mutable=...)``; it gives float32 logits.
"""

from decomp.tasks.models.cnn import cnn
from decomp.tasks.models.dense import mlp, softmax_regression
from decomp.tasks.models.resnet import resnet, resnet8, resnet20
from decomp.tasks.models.transformer import char_transformer

__all__ = ['char_transformer', 'cnn', 'mlp', 'resnet', 'resnet8', 'resnet20', 'softmax_regression']
