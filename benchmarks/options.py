"""Measures one model by all sets of options of `bcosvit reproduce options`, and its additivity.

python benchmarks/options.py --weights bcos_vit_ti_87_imagenette --data imagenette/ --out options
python benchmarks/options.py --weights bcos_vit_lite2_imagenet --data imagenet-val/ --out options

`bcosvit evaluate --set` measures one set of options at a time; here all of them share their passes.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from bcosvit.data.labeled import labeled_images
from bcosvit.data.sources import open_source
from bcosvit.metrics import METRICS, configure, evaluate
from bcosvit.paper.faithfulness import Options
from bcosvit.paper.figures import options_label
from bcosvit.predictor import Predictor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--methods", default="inherent,ixg,gradsam,rollout,libragrad")
    parser.add_argument("--metrics", default="perturbation,additivity,localization")
    parser.add_argument("--images", type=int, default=250)
    parser.add_argument("--grids", type=int, default=250)
    parser.add_argument("--points", type=int, default=9, help="Of a perturbation curve")
    parser.add_argument("--limit", type=int, help="How many images are drawn")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-workers", type=int, default=0)
    given = parser.parse_args()
    predictor = Predictor.load(given.weights, "auto")
    images = labeled_images(
        open_source(given.data, only_val=True),
        "val",
        predictor.class_names if predictor.has_class_names else None,
        predictor.transform,
        num_classes=len(predictor.class_names),
        class_ids=predictor.class_ids,
    )
    if given.limit:
        images.limit(given.limit, seed=0)
    folder = Path(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    amounts = {"images": given.images, "grids": given.grids, "points": given.points}
    known, written = None, {"command": sys.argv}
    for name in given.metrics.split(","):
        began, metric = time.monotonic(), METRICS.get(name)
        mine = {key: value for key, value in amounts.items() if hasattr(metric, key)}
        sets = Options.sets.get(name, [{}])
        chosen = [configure(metric, {**mine, **each}) for each in sets]
        found = evaluate(
            predictor.model,
            images,
            given.methods.split(","),
            metrics=chosen,
            batch_size=given.batch_size,
            num_workers=given.num_workers,
            known=known,
        )
        known = found.accuracy
        results = [result for key, result in found.results.items() if key != "accuracy"]
        for options, result in zip(sets, results, strict=True):
            for title, column in result.columns().items():
                cells = ", ".join(f"{method} {each}" for method, each in column.items())
                print(f"{title}; {options_label(options)}: {cells}", flush=True)
        seconds = time.monotonic() - began
        written[name] = {"seconds": seconds, "summary": found.summary()}
        (folder / "summary.json").write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
