"""Our v2 DenseNet-121 against PyPI's ``bcos``, from a state dict that it saved."""

import pytest
import torch

from bcosvit import create_model, explain, load_backbone
from bcosvit._torchvision import torchvision  # noqa: F401  (the peer imports it unguarded)

from bcos.models.densenet import densenet121  # isort: skip
from bcos.modules import norms  # isort: skip


@pytest.fixture(scope="module")
def peer() -> torch.nn.Module:
    torch.manual_seed(3)
    peer = densenet121(norm_layer=norms.NoBias(norms.BatchNormUncentered2d), num_classes=20)
    # Statistics and scales of real data, or the signal dies within the 121 layers.
    peer.train()
    with torch.no_grad():
        for module in peer.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
                module.weight.uniform_(0.5, 1.5)
        x = torch.rand(2, 3, 64, 64)
        peer(torch.cat([x, 1 - x], 1))
    # In float64, so that what differs is the function, not the rounding of 121 layers.
    return peer.eval().double()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_logits_and_contributions_agree(peer, tmp_path):
    torch.save(peer.state_dict(), tmp_path / "bcos_v2.pth")
    ours = create_model("bcos_densenet121", flavor="v2", num_classes=20).double().eval()
    assert load_backbone(ours, tmp_path / "bcos_v2.pth") == []
    assert ours.logit.bias == pytest.approx(peer.logit_layer.logit_bias)

    x = torch.rand(2, 3, 96, 96, dtype=torch.float64)
    encoded = torch.cat([x, 1 - x], 1)
    evidence = peer(encoded).detach() - ours.logit.bias
    assert relative(ours(x).detach() - ours.logit.bias, evidence) < 1e-9
    attribution = explain(ours, x, "all")
    for i in range(2):
        for k in (0, 7):
            result = peer.explain(encoded[i : i + 1].clone().requires_grad_(), idx=k)
            assert relative(attribution.weights[i, k], result["dynamic_linear_weights"][0]) < 1e-9
            assert relative(attribution.map[i, k], result["contribution_map"][0]) < 1e-9


def test_state_dict_loads_by_its_own_names(peer):
    """Also without our loader: the published keys are accepted as they are."""
    ours = create_model("bcos_densenet121", flavor="v2", num_classes=20).double().eval()
    ours.load_state_dict(peer.state_dict())
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(ours(x), peer(torch.cat([x, 1 - x], 1)))


def test_tokenizer_takes_the_same_file(peer, tmp_path):
    torch.save(peer.state_dict(), tmp_path / "bcos_v2.pth")
    model = create_model("bcos_vit_ti_38", backbone="v2", num_classes=2).double().eval()
    unused = load_backbone(model, tmp_path / "bcos_v2.pth")
    assert "features.denseblock3.denselayer1.conv1.weight" in unused
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    encoded = torch.cat([x, 1 - x], 1)
    theirs = encoded
    for name, part in peer.features.named_children():
        theirs = part(theirs)
        if name == "denseblock2":
            break
    assert relative(model.tokenizer.backbone(encoded), theirs.detach()) < 1e-9
