"""Convolutional networks for square images, as those of Thin et al. (2021)."""

from torch import Tensor, nn
from torch.nn.functional import gelu, pad


class Block(nn.Module):
    """Two 3x3 convolutions around which the image goes on as it is, then a change of size."""

    def __init__(self, channels: int, new_channels: int, resize: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, new_channels, 3, padding=1)
        self.second = nn.Conv2d(new_channels, new_channels, 3, padding=1)
        self.resize, self.extra = resize, new_channels - channels

    def forward(self, x: Tensor) -> Tensor:
        # Channels that the block adds begin as zeros; those that it drops end here.
        past = pad(x, (0, 0, 0, 0, 0, self.extra))
        result: Tensor = self.resize(gelu(self.second(gelu(self.first(x))) + past))
        return result


def convolutional(
    num_latents: int, channels: int = 1, size: int = 28
) -> tuple[nn.Module, nn.Module]:
    """
    Encoder and decoder of square images, whose rows hold one channel after the other.

    Eight convolutional layers and a linear one to the parameters of a normal distribution; a linear
    layer, nearest-neighbour upsampling and convolutions back to logits or means. Sizes, of MNIST:
    28, 14, 7, 3. Convolutions know one leading dim: several particles are run under ``vmap``.
    """
    least = size // 8
    encoder = nn.Sequential(
        nn.Unflatten(1, (channels, size, size)),
        Block(channels, 16, nn.AvgPool2d(2)),
        Block(16, 32, nn.AvgPool2d(2)),
        Block(32, 64, nn.AvgPool2d(2)),
        Block(64, 64, nn.Identity()),
        nn.Flatten(),
        nn.Linear(64 * least * least, 2 * num_latents),
    )
    decoder = nn.Sequential(
        nn.Linear(num_latents, 64 * least * least),
        nn.Unflatten(1, (64, least, least)),
        Block(64, 32, nn.Upsample(size // 4)),
        Block(32, 16, nn.Upsample(size // 2)),
        Block(16, 16, nn.Identity()),
        # A 1x1 convolution and nearest-neighbour upsampling commute; this order moves less memory.
        nn.Conv2d(16, channels, 1),
        nn.Upsample(size),
        nn.Flatten(),
    )
    return encoder, decoder
