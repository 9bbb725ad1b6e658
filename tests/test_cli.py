"""The installed command, run as a user runs it."""

import pytest

from tests.command import bcosvit


def test_info_prints_the_models_costs():
    result = bcosvit("info", "bcos_vit_ti_38", "--batch", "8", "--set", "maxout=1")
    assert result.returncode == 0, result.stderr
    # 12 blocks of width 192 without MaxOut: 12·(4·192² + 8·192²) weights, q and k biases, LayerNorm
    # and a prior of 3·196² each.
    parameters = 12 * (12 * 192**2 + 2 * 192 + 2 * 192 + 3 * 196**2)
    assert f"{parameters:,}" in result.stdout
    assert "14×14 = 196" in result.stdout
    assert "training, batch 8" in result.stdout


def test_info_of_all():
    result = bcosvit("info", "all")
    assert "bcos_vit_b_87" in result.stdout
    assert "densenet121" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["info", "bcos_vit_ti_39"], "did you mean"),
        (["info", "bcos_vit_ti_38", "--set", "b=0.5"], "B = 0.5"),
        (["info", "bcos_vit_ti_38", "--set", "maxout"], "write key=value"),
        (["export", "--format", "paper", "--out", "o"], "choose from onnx, torch-export, hub"),
    ],
)
def test_mistakes_are_one_sentence(arguments, says):
    result = bcosvit(*arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
