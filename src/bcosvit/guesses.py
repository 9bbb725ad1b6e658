"""What users of other libraries try first, and what it is called here."""

from collections.abc import Iterable

from bcosvit.messages import unknown

_CAPTUM = (
    "bcosvit.attribution.interop.CaptumStyle(model, {method!r}).attribute(images, target=...) has "
    "the interface of captum, and bcosvit.explain(model, images, target, method={method!r}) does "
    "the same"
)
_EXPLAIN = 'a = bcosvit.explain(model, "photo.jpg"), then a.plot(), a.show() or a.save("a.png")'
_LOAD = "bcosvit.load(name), or bcosvit.from_pretrained(folder or repository), loads weights"
_TRANSFORM = "model.transform turns a PIL image into the input of that model"
_CONFIG = "model.config is its config, and model.transform turns a PIL image into its input"
_PREDICT = 'bcosvit.Predictor.load()("photo.jpg") returns labels and scores'
_COMMAND = "`bcosvit {command}` does this in the terminal, and bcosvit.{module} in Python"

GUESSES = {
    # timm
    "list_pretrained": "bcosvit.list_models(pretrained=True) lists the models with weights",
    "is_model": "bcosvit.list_models() lists the models",
    "create_transform": _TRANSFORM,
    "resolve_data_config": _TRANSFORM,
    "resolve_model_data_config": _TRANSFORM,
    "create_feature_extractor": "bcosvit.features(model) returns the maps of all stages",
    # torchvision
    "get_model": "bcosvit.create_model(name, pretrained=True) makes one with weights",
    "get_weight": _LOAD,
    "transforms": _TRANSFORM,
    # Hugging Face
    "pipeline": _PREDICT,
    "AutoModel": _LOAD,
    "AutoModelForImageClassification": _LOAD,
    "AutoConfig": "bcosvit.load(name).config is the config of a model",
    "AutoImageProcessor": _TRANSFORM,
    "ImageClassificationPipeline": _PREDICT,
    # captum
    "Saliency": _CAPTUM.format(method="ixg"),
    "InputXGradient": _CAPTUM.format(method="ixg"),
    "IntegratedGradients": _CAPTUM.format(method="intgrad"),
    "LRP": _CAPTUM.format(method="cheferlrp"),
    "Occlusion": _CAPTUM.format(method="occlusion"),
    "LayerGradCam": _CAPTUM.format(method="gradcam"),
    "GradCAM": _CAPTUM.format(method="gradcam"),
    "NoiseTunnel": _CAPTUM.format(method="smoothgrad"),
    "attribute": _CAPTUM.format(method="inherent"),
    # Everybody
    "attr": "the explanation methods are in bcosvit.attribution",
    "predict": _PREDICT,
    "classify": _PREDICT,
    "visualize": _EXPLAIN,
    "visualize_image_attr": _EXPLAIN,
    "plot": _EXPLAIN,
    "show": _EXPLAIN,
    "heatmap": _EXPLAIN,
    "load_model": _LOAD,
    "evaluate": _COMMAND.format(command="evaluate", module="metrics.evaluate"),
    "serve": _COMMAND.format(command="serve", module="web.app.serving"),
    "fit": _COMMAND.format(command="train", module="train.train"),
    "Trainer": _COMMAND.format(command="train", module="train.train"),
}

MODEL_GUESSES = {
    "explain": _EXPLAIN,
    "explanation_mode": "bcosvit.frozen_view(model) is the linear model behind an explanation",
    "attribute": _CAPTUM.format(method="inherent"),
    "predict": 'bcosvit.Predictor.of(model)("photo.jpg") returns labels and scores',
    "fit": _COMMAND.format(command="train", module="train.train"),
    "forward_intermediates": "bcosvit.features(model) returns the maps of all stages",
    "default_cfg": _CONFIG,
    "pretrained_cfg": _CONFIG,
    "id2label": "model.classes are the names of its classes",
}
"""The same for models, where people look for methods of timm's, Hugging Face's or other models."""


def no_attribute(name: str, public: Iterable[str]) -> str:
    """Writes the error message for a name that the package does not have: one sentence that names
    the call to make instead, where one is known.

    Examples:
        >>> no_attribute("pipeline", ["load"])
        'bcosvit has no pipeline; bcosvit.Predictor.load()("photo.jpg") returns labels and scores.'
        >>> no_attribute("creat_model", ["create_model"])
        "There is no name of bcosvit 'creat_model'; did you mean 'create_model'?"
    """
    if name in GUESSES:
        return f"bcosvit has no {name}; {GUESSES[name]}."
    return unknown("name of bcosvit", name, public)
