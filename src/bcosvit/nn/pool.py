"""Average pooling whose gradient is right on a GPU, too."""

from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from bcosvit.nn.dynamic import DynamicModule, twin_of


@twin_of(nn.AvgPool2d)
class AvgPool2d(DynamicModule, nn.AvgPool2d):
    """torch's, kept away from one of its CUDA kernels.

    Where windows overlap and channels lie last in memory, torch 2.11 returns a wrong gradient (at
    3×3 windows and stride 2 by as much as the gradient itself), so that contributions through a
    DenseNet's stem would be wrong. Inputs that are differentiated are rearranged first.
    """

    def forward(self, x: Tensor) -> Tensor:
        windows = zip(_pair(self.kernel_size), _pair(self.stride), strict=True)
        overlap = any(size > step for size, step in windows)
        return super().forward(x.contiguous() if overlap and x.requires_grad else x)
