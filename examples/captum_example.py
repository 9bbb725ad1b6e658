"""Compares inherent explanations with captum's, through captum's interface.

    python examples/captum_example.py

Needs ``pip install captum``. The model is small and its weights are random: the example shows how
to use the two libraries together, not how good an explanation is.
"""

import torch
from captum.attr import IntegratedGradients
from captum.metrics import sensitivity_max

import bcosvit
from bcosvit.attribution.interop import CaptumStyle


def jitter(inputs: torch.Tensor, radius: float = 0.02) -> torch.Tensor:
    """Adds a little noise and keeps images in [0, 1]."""
    return (inputs + radius * (2 * torch.rand_like(inputs) - 1)).clamp(0, 1)


def main() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = bcosvit.ModelConfig(
        width=32, num_heads=2, depth=2, image_size=16, num_classes=5, backbone=bcosvit.StemConfig()
    )
    model = bcosvit.create_model(config).eval()
    images, target = torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    methods = {
        "inherent (ours)": CaptumStyle(model),
        "IntGrad (captum)": IntegratedGradients(model),
        "SmoothGrad (ours)": CaptumStyle(model, "smoothgrad"),
    }
    attributions = {}
    for name, method in methods.items():
        attributions[name] = method.attribute(images, target=target)
        print(f"{name:18} {list(attributions[name].shape)}", end="")
        if method.has_convergence_delta():
            _, delta = method.attribute(images, target=target, return_convergence_delta=True)
            print(f"  largest error {delta.abs().max().item():.1e}", end="")
        # Captum's metrics accept these objects, too.
        change = sensitivity_max(
            method.attribute, images, jitter, n_perturb_samples=2, target=target
        )
        print(f"  sensitivity {change.mean().item():.3f}")
    return attributions


if __name__ == "__main__":
    main()
