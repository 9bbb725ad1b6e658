"""Explains a drawn picture with a B-cos ViT: what `make demo` runs."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import bcosvit


def picture(size: int = 224) -> torch.Tensor:
    """An orange ball on a green ground."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    ball = ((x - 0.2) ** 2 + (y + 0.1) ** 2 < 0.16).float()
    light = (1 - ((x - 0.1) ** 2 + (y + 0.25) ** 2)).clamp(0, 1)
    colour = torch.tensor([1.0, 0.55, 0.1]).view(3, 1, 1) * light
    ground = torch.stack([0.2 + 0.1 * x, 0.5 + 0.2 * y, 0.25 * torch.ones_like(x)])
    return (ball * colour + (1 - ball) * ground).clamp(0, 1)


def main() -> None:
    torch.manual_seed(0)
    image = picture()[None]
    model = bcosvit.create_model("bcos_vit_ti_38", num_classes=10).eval()
    a = bcosvit.explain(model, image)
    print("B-cos ViT-Ti-38 with random weights; class", a.target.item())
    print(f"  logit                 {a.logit.item():+.6f}")
    print(f"  Σ contributions       {a.map.sum().item():+.6f}")
    print(f"  residual, bias        {a.residual.item():+.6f}, {a.bias:+.6f}")
    print(f"  completeness error    {a.completeness_error().item():.1e}")
    out = Path("demo-out")
    out.mkdir(exist_ok=True)
    share = (a.map[0] / a.map.abs().max()).clamp(-1, 1)
    red, blue = 1 - (-share).clamp(0), 1 - share.clamp(0)
    panel = torch.cat([image[0], torch.stack([red, torch.minimum(red, blue), blue])], 2)
    Image.fromarray(np.uint8(255 * panel.permute(1, 2, 0).numpy())).save(out / "explanation.png")
    print("Picture and contributions:", (out / "explanation.png").resolve())


if __name__ == "__main__":
    main()
