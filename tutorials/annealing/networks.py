"""Convolutional networks for square images, those of Thin et al. (2021)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad


class Conv(nn.Conv2d):
    """A convolution with the channels last in memory, which takes three quarters of the time."""

    def forward(self, x: Tensor) -> Tensor:
        # In each call: of parameters that lie so Pyro trains a copy, which no module reads.
        weight = self.weight.contiguous(memory_format=torch.channels_last)
        return self._conv_forward(x, weight, self.bias)


class Block(nn.Module):
    """
    A change of size, then two 3x3 convolutions with GELU.

    The resized image is added to what they make, unless they have fewer channels.
    """

    def __init__(self, resize: nn.Module, channels: int, middle: int, new_channels: int) -> None:
        super().__init__()
        self.resize = resize
        self.first = Conv(channels, middle, 3, padding=1)
        self.second = Conv(middle, new_channels, 3, padding=1)
        self.extra = new_channels - channels

    def forward(self, x: Tensor) -> Tensor:
        x = self.resize(x)
        result = gelu(self.second(gelu(self.first(x))))
        if self.extra < 0:
            return result
        # Padding by nothing copies.
        return result + (pad(x, (0, 0, 0, 0, 0, self.extra)) if self.extra else x)


def convolutional(
    num_latents: int, channels: int = 1, size: int = 28
) -> tuple[nn.Module, nn.Module]:
    """
    Encoder and decoder of square images, whose rows hold one channel after the other.

    Eight convolutional layers and a linear one to the parameters of a normal distribution; a linear
    layer, nearest-neighbour upsampling and seven convolutions back to logits or means. Sizes, of
    MNIST: 28, 14, 7, 3, and back 3, 6, 12, 28; 219,504 and 74,441 weights, as published.
    Convolutions know one leading dim: several particles are run under ``vmap``.
    """
    least = size // 8
    encoder = nn.Sequential(
        nn.Unflatten(1, (channels, size, size)),
        Block(nn.Identity(), channels, 16, 16),
        Block(nn.MaxPool2d(2), 16, 32, 32),
        Block(nn.MaxPool2d(2), 32, 64, 64),
        Block(nn.MaxPool2d(2), 64, 64, 64),
        nn.Flatten(),
        nn.Linear(64 * least * least, 2 * num_latents),
    )
    decoder = nn.Sequential(
        nn.Linear(num_latents, 64 * least * least),
        nn.Unflatten(1, (64, least, least)),
        Block(nn.Upsample(2 * least), 64, 32, 32),
        Block(nn.Upsample(4 * least), 32, 16, 16),
        Block(nn.Upsample(size), 16, 8, 16),
        Conv(16, channels, 1),
        nn.Flatten(),
    )
    return encoder, decoder
