"""The reference of experiments.benchmark in PyTorch, where that is installed."""

from collections.abc import Callable
from typing import Any


def torch_loop(n: int, batch_size: int, count: int) -> Callable[[], Any]:
  """Gradients of n ResNet-20 in PyTorch, one after another, in its fast memory format."""
  import torch
  from torch import nn

  class Block(nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, inputs: int, outputs: int, stride: int):
      super().__init__()
      self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
      self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
      self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
      self.stride, self.grow = stride, outputs - inputs

    def forward(self, x: Any) -> Any:
      y = torch.relu(self.norms[0](self.first(x)))
      y = self.norms[1](self.second(y))
      short = x[:, :, :: self.stride, :: self.stride]
      if self.grow:
        short = nn.functional.pad(short, (0, 0, 0, 0, 0, self.grow))
      return torch.relu(y + short)

  def model() -> Any:
    widths = [16] * 3 + [32] * 3 + [64] * 3
    blocks = [Block(a, b, 1 + (a != b)) for a, b in zip([16, *widths[:-1]], widths, strict=True)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*stem, *blocks, *head).to(memory_format=torch.channels_last)

  everyone = [model() for _ in range(n)]
  x = torch.randn(batch_size, 3, 32, 32).to(memory_format=torch.channels_last)
  labels = torch.randint(0, 10, (batch_size,))

  def program() -> None:
    for _ in range(count):
      for one in everyone:
        loss = nn.functional.cross_entropy(one(x), labels)
        one.zero_grad()
        loss.backward()
        with torch.no_grad():
          for p in one.parameters():
            p -= 0.01 * p.grad

  return program
