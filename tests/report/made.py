"""An evaluation with every metric, made up: small models are rarely right by chance."""

import torch

from bcosvit.metrics import (
    Accuracy,
    Bootstrap,
    Evaluation,
    GridPointingGame,
    MaskOverlap,
    PixelPerturbation,
    Prediction,
)

METHODS = ("inherent", "ixg", "gradcam", "rollout", "random")


def evaluation(images: int = 40) -> Evaluation:
    """The first method is the best at everything, the others follow in order."""
    generator = torch.Generator().manual_seed(0)
    predictions = [
        Prediction(
            index=index,
            key=f"class/{index}.jpg",
            label=index % 5,
            predicted=index % 5,
            place=0 if index % 7 else 3,
            confidence=0.9,
            log_odds=2.0,
        )
        for index in range(images)
    ]
    bootstrap, game, metric = Bootstrap(), GridPointingGame(grids=12), PixelPerturbation(images=20)
    grids = [tuple(predictions[start : start + 4]) for start in range(0, images, 4)]

    def noise(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    scores, curves, masked = {}, {}, {}
    falls = torch.linspace(0, 1, metric.points, dtype=torch.float64)
    for place, method in enumerate(METHODS):
        skill = 1 - place / (len(METHODS) - 1)
        scores[method] = 0.25 + 0.3 * skill + 0.2 * (noise(len(grids), 4) - 0.5)
        drop = torch.stack([falls * (0.1 + 0.8 * skill), falls * 0.1])
        curves[method] = 0.9 - drop * (0.6 + 0.3 * noise(20, 1, 1))
        masked[method] = 0.2 + 0.6 * skill + 0.1 * noise(images, 2)
    single = [(prediction,) for prediction in predictions]
    area = torch.full((images, 1), 0.17, dtype=torch.float64)
    masked = {method: torch.cat([each, area], 1) for method, each in masked.items()}
    return Evaluation(
        results={
            "accuracy": Accuracy().result(single, {}, bootstrap),
            "localization": game.result(grids, scores, bootstrap),
            "perturbation": metric.result(single[:20], curves, bootstrap),
            "masks": MaskOverlap().result(single, masked, bootstrap, 3),
        },
        left_out={},
        settings={"methods": list(METHODS), "bootstrap": {"level": 0.95}},
    )
