"""Measures by how much contributions miss the logit where a model computes in half precision.

python benchmarks/half_precision.py --data imagenet-val/ --images 100

For the predicted class of photographs that are drawn at random, as a share of its logit (or of the
logit bias, if that is larger): the model cast to each dtype, and in float32 under autocast.
"""

import argparse
import json
import time

import torch
from torch import Tensor

import bcosvit
from bcosvit.attribution import Attribution
from bcosvit.data.labeled import labeled_images
from bcosvit.data.sources import open_source
from bcosvit.predictor import Predictor

WAYS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16 by autocast": (torch.float32, torch.bfloat16),
    "float16": (torch.float16, None),
    "float16 by autocast": (torch.float32, torch.float16),
}
"""What the model is cast to, and what autocast is set to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default="bcos_vit_lite2_imagenet")
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--ways", default=",".join(WAYS), help="Some of these")
    given = parser.parse_args()
    for way in given.ways.split(","):
        dtype, narrow = WAYS[way]
        predictor = Predictor.load(given.weights, "auto")
        images = labeled_images(
            open_source(given.data, only_val=True),
            "all",
            predictor.class_names if predictor.has_class_names else None,
            predictor.transform,
            num_classes=len(predictor.class_names),
            class_ids=predictor.class_ids,
        )
        images.limit(given.images, seed=0)
        model = predictor.model.to(dtype)
        device = next(model.parameters()).device
        began, missed = time.monotonic(), []
        for batch in torch.utils.data.DataLoader(images, batch_size=given.batch_size):
            with torch.autocast(device.type, narrow, enabled=narrow is not None):
                missed.append(shares(bcosvit.explain(model, batch[0].to(device, dtype))))
        found = torch.cat(missed)
        print(
            json.dumps(
                {
                    "computed in": way,
                    "images": len(found),
                    "worst": float(f"{found.max():.2g}"),
                    "mean": float(f"{found.mean():.2g}"),
                    "seconds": round(time.monotonic() - began),
                }
            ),
            flush=True,
        )


def shares(found: Attribution) -> Tensor:
    """By how much the contributions miss each logit, as `bcosvit evaluate` measures it."""
    assert found.logit is not None
    return found.completeness_error() / found.logit.double().abs().clamp(min=abs(found.bias))


if __name__ == "__main__":
    main()
