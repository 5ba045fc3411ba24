"""ResNet-20 for images of 32 x 32, as published with CIFAR-10: 0.27 million parameters.

He, Zhang, Ren, Sun, "Deep residual learning for image recognition", 2016, section 4.2: one
convolution, three stages of three blocks with 16, 32 and 64 channels, the mean over all places, one
linear layer. Where a stage halves the image, its shortcut takes every second place and pads the new
channels with zeros (option A), so that shortcuts have no parameters.

Legend of shapes: ``B`` images, ``C`` channels, ``H`` by ``W`` places.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
"""Of CIFAR-10's training images, red, green and blue, as shares of 255."""


def resnet20(classes: int = 10) -> nn.Sequential:
    """``(B, 3, 32, 32)`` bytes to ``(B, classes)`` scores."""
    stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
    blocks = [
        block
        for inside, outside, stride in stages
        for block in (
            Block(inside, outside, stride),
            Block(outside, outside),
            Block(outside, outside),
        )
    ]
    network = nn.Sequential(
        FromBytes(), _convolution(3, 16), nn.BatchNorm2d(16), nn.ReLU(), *blocks, MeanOfPlaces()
    )
    network.append(nn.Linear(64, classes))
    return network


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, outside - inside
        self.first = _convolution(inside, outside, stride)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = _convolution(outside, outside)
        self.second_norm = nn.BatchNorm2d(outside)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Add what the convolutions have to say."""
        branch = self.second_norm(self.second(F.relu(self.first_norm(self.first(x_BCHW)))))
        return F.relu(branch + self._shortcut(x_BCHW))

    def _shortcut(self, x_BCHW: Tensor) -> Tensor:
        if not self.new_channels:
            return x_BCHW
        half = self.new_channels // 2
        taken = x_BCHW[:, :, :: self.stride, :: self.stride]
        return F.pad(taken, (0, 0, 0, 0, half, self.new_channels - half))


class FromBytes(nn.Module):
    """Bytes to numbers around 0: the data stay bytes until the model's device has them."""

    def forward(self, bytes_BCHW: Tensor) -> Tensor:
        """Normalise each colour."""
        device = bytes_BCHW.device
        mean = torch.tensor(MEAN, device=device)[:, None, None]
        deviation = torch.tensor(DEVIATION, device=device)[:, None, None]
        return (bytes_BCHW.float() / 255 - mean) / deviation


class MeanOfPlaces(nn.Module):
    """``(B, C, H, W)`` to ``(B, C)``."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """The mean over all places."""
        return x_BCHW.mean(dim=(2, 3))


def _convolution(inside: int, outside: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight)
    return convolution
