"""A linear classifier of colors, pictures with one colored patch, and attributions made by hand.

Class k's logit counts pixels: +1/2 for one of color k, −1 for gray, −1/2 or less for any other
color. So contributions are known without any library, are positive on the patch alone, and the
patch is the mask.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from bcosvit.attribution import Attribution
from bcosvit.models import Classifier
from bcosvit.nn.encoding import BcosEncoding

COLORS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)]


class Linear(Classifier):
    """Logits = gain · mean over pixels of weight·x + bias."""

    def __init__(self, weight: Tensor, *, gain=1.0, bias=0.0, family="bcos") -> None:
        super().__init__()
        activation = "sigmoid" if family == "bcos" else "softmax"
        options = {"family": family, "activation": activation}
        self.config = SimpleNamespace(**options, num_classes=len(weight), image_size=(8, 8))
        self.encoding = BcosEncoding()
        self.weight = nn.Parameter(weight)
        self.gain, self.bias = gain, bias
        self.forwards: list[int] = []
        self.eval()

    def from_encoded(self, encoded: Tensor) -> Tensor:
        self.forwards.append(len(encoded))
        return self.gain * torch.einsum("kc,bchw->bk", self.weight, encoded) + self.bias


def color_model(classes=5, gain=0.05, family="bcos") -> Linear:
    colors = torch.tensor(COLORS[:classes], dtype=torch.float32)
    # Equal channels of x and of the color, 3 where all agree; the channels of x sum to 3.
    return Linear(torch.cat([colors, 1 - colors], 1) - 2.5 / 3, gain=gain, family=family)


class Patches:
    """``each`` pictures a class, with patches of falling size on gray; some labels are wrong."""

    def __init__(self, classes=5, each=4, size=8, wrong=0) -> None:
        self.classes, self.each, self.size, self.wrong = classes, each, size, wrong
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.classes * self.each

    def mask(self, index: int) -> Tensor:
        number = index // self.classes
        mask = torch.zeros(self.size, self.size, dtype=torch.bool)
        side = max(2, self.size - 1 - number)
        top, left = number % (self.size - side + 1), index % (self.size - side + 1)
        mask[top : top + side, left : left + side] = True
        return mask

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        self.reads.append(index)
        label = index % self.classes
        color = torch.tensor(COLORS[label], dtype=torch.float32).view(3, 1, 1)
        shown = (label + 1) % self.classes if index < self.wrong else label
        image = torch.where(self.mask(index), color, torch.tensor(0.5))
        return image, shown, f"image{index:03d}"


@dataclass(frozen=True)
class Contributions:
    """The exact ones of a ``Linear``."""

    sign: float = 1.0

    def __call__(self, model, images, target=None):
        encoded = model.encoding(images)
        maps = torch.einsum("bc,bchw->bhw", model.weight[target].detach(), encoded)
        return Attribution(map=self.sign * model.gain * maps, target=target)


@dataclass(frozen=True)
class Uniform:
    """The same everywhere."""

    value: float = 1.0

    def __call__(self, model, images, target=None):
        shape = (len(images), *images.shape[-2:])
        return Attribution(map=images.new_full(shape, self.value), target=target)
