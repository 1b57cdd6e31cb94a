"""Convolutional networks of Thin et al. (2021) for square images."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad


class Conv(nn.Conv2d):
    """A convolution with channels-last memory format, which takes three quarters of the time."""

    def forward(self, x: Tensor) -> Tensor:
        # Convert in each call. If parameters had this format, Pyro would train a copy of them.
        weight = self.weight.contiguous(memory_format=torch.channels_last)
        return self._conv_forward(x, weight, self.bias)


class Block(nn.Module):
    """
    Resize the image and apply two 3x3 convolutions with GELU.

    The resized image is added to the output, unless the output has fewer channels.
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
        # Padding by zero entries would copy.
        return result + (pad(x, (0, 0, 0, 0, 0, self.extra)) if self.extra else x)


def convolutional(
    num_latents: int, channels: int = 1, size: int = 28
) -> tuple[nn.Module, nn.Module]:
    """
    Return the encoder and the decoder of square images. Rows have one channel after the other.

    The encoder has eight convolutional layers and a linear layer for the parameters of a normal
    distribution. The decoder has a linear layer, nearest-neighbor upsampling and seven convolutions
    for logits or means. Sizes for MNIST are 28, 14, 7, 3, and back 3, 6, 12, 28, with 219,504 and
    74,441 weights, as published. Convolutions accept one leading dim, so several particles run
    under ``vmap``.
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
