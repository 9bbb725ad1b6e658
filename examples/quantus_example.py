"""Evaluates inherent explanations with Quantus' metrics.

    python examples/quantus_example.py

Needs ``pip install quantus``. The model is small and its weights are random: the example shows how
to use the two libraries together, not how good an explanation is.
"""

import numpy as np
import quantus
import torch

import bcosvit
from bcosvit.attribution.interop import quantus_explain_func


def main() -> dict[str, list[float]]:
    torch.manual_seed(0)
    config = bcosvit.ModelConfig(
        width=32, num_heads=2, depth=2, image_size=16, num_classes=5, backbone=bcosvit.StemConfig()
    )
    model = bcosvit.create_model(config).eval()
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        labels = model(images).argmax(1)
    batch = {"model": model, "x_batch": images.numpy(), "y_batch": labels.numpy()}
    scores = {}
    for method in ("inherent", "intgrad", "rollout"):
        # How concentrated an explanation is, and how the logit falls as pixels turn black.
        metrics = {
            "Sparseness": quantus.Sparseness(disable_warnings=True),
            "PixelFlipping": quantus.PixelFlipping(
                features_in_step=32,
                perturb_baseline="black",
                disable_warnings=True,
            ),
        }
        for name, metric in metrics.items():
            found = metric(**batch, explain_func=quantus_explain_func(method), channel_first=True)
            # One number per image, or one curve per image, of which the mean is printed.
            scores[f"{method} {name}"] = [float(np.mean(value)) for value in found]
            numbers = ", ".join(f"{value:.3f}" for value in scores[f"{method} {name}"])
            print(f"{method:9} {name:14} {numbers}")
    return scores


if __name__ == "__main__":
    main()
