"""Runs an exported model with its explanation, using only ONNX Runtime, Pillow and NumPy.

bcosvit export --with-explanation --out model.onnx
python examples/onnx_example.py model.onnx photo.jpg contributions.png
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image


def prepare(path: str, size: int, resize: int) -> np.ndarray:
    """Resizes the short side and crops the center; returns [1, 3, size, size], RGB in [0, 1]."""
    picture = Image.open(path).convert("RGB")
    scale = resize / min(picture.size)
    width, height = (max(resize, int(side * scale)) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)), np.float32) / 255
    return pixels.transpose(2, 0, 1)[None]


def main(model: str, photo: str, out: str) -> None:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    notes = session.get_modelmeta().custom_metadata_map
    classes, given = json.loads(notes["bcosvit.classes"]), json.loads(notes["bcosvit.input"])
    image = prepare(photo, given["size"][0], given["resize_short_side"])
    # The class to explain; -1 stands for the predicted class.
    feed = {"image": image, "target": np.array([-1])}
    logits, contributions, _ = session.run(None, feed)
    predicted = classes[logits[0].argmax()]
    print(f"{predicted}: logit {logits.max():.2f}, of which {contributions.sum():.2f} from pixels")
    # Red is evidence for the class, blue is evidence against it.
    strength = np.clip(contributions[0] / np.percentile(np.abs(contributions), 99.5), -1, 1)
    red, blue = 1 - np.clip(-strength, 0, 1), 1 - np.clip(strength, 0, 1)
    colors = np.stack([red, 1 - np.abs(strength), blue], -1)
    Image.fromarray((255 * colors).astype(np.uint8)).save(out)


if __name__ == "__main__":
    main(*sys.argv[1:4])
