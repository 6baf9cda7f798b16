"""What `dwtir.nn.convert` made, in use."""

import copy
import pickle

import pytest
import torch
from torch import nn

from dwtir.nn import OriginalPathWarning, restore
from marks import parametrize, warnings_allowed
from networks import FORMS, always, assert_close, chain, depthwise, example, forms, image_of, mobilenet, norms_of, stage

pytestmark = pytest.mark.usefixtures("no_gradients")


@forms
def test_other_batch_sizes_need_no_word(form):
    model = mobilenet()
    images = [image_of(n, 3, 32, 32, form=form) for n in (2, 1, 5, 0)]
    expected = [model(image) for image in images]
    always(model, images[0])
    for image, output in zip(images, expected, strict=True):
        assert model(image).shape == output.shape
        if len(image):
            assert_close(model(image), output)


@parametrize(
    ("change", "message"),
    [
        (lambda image: image[..., :-1], r"0 runs .*: it is not converted for \(2, 6, 9, 6\)"),
        (lambda image: image.contiguous(memory_format=FORMS[1]), "channels_last"),
        (lambda image: image[0], "unbatched"),
    ],
)
def test_other_images_are_told_once(change, message):
    model, image = chain(depthwise(), nn.ReLU()), image_of()
    expected = model(change(image))
    always(model, image)
    with pytest.warns(OriginalPathWarning, match=message):
        assert torch.equal(model(change(image)), expected)
    assert torch.equal(model(change(image)), expected)  # pytest makes errors of warnings


def test_another_type_runs_the_original():
    model, image = stage(), image_of()
    always(model, image)
    model.double()
    with pytest.warns(OriginalPathWarning, match=r"torch\.float64"):
        got = model(image.double())
    restore(model)
    assert torch.equal(got, model(image.double()))


def beside_its_original(model, *size):
    original, image = copy.deepcopy(model), image_of(*size)
    always(model, image)
    return model, original, image


def test_gradients_are_the_originals():
    model, original, image = beside_its_original(stage())
    with torch.enable_grad():
        with pytest.warns(OriginalPathWarning, match="a gradient is wanted"):
            model(image).sum().backward()
        original(image).sum().backward()
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_training_is_the_originals():
    model, original, image = beside_its_original(mobilenet(), 2, 3, 32, 32)
    for network in (model, original):
        network.train()
        with torch.enable_grad():
            network(image).square().mean().backward()
        torch.optim.SGD(network.parameters(), 0.1).step()
        network.eval()
    for name, values in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], values)
    assert_close(model(image), original(image))


def test_what_only_training_uses_is_kept():
    model, original, image = beside_its_original(chain(depthwise(), nn.Dropout(), nn.BatchNorm2d(6), nn.ReLU()))
    torch.manual_seed(1)
    got = model.train()(image)
    torch.manual_seed(1)
    assert torch.equal(got, original.train()(image))


@forms
def test_new_values_are_folded_anew(form):
    model, other, image = mobilenet(), mobilenet(), image_of(2, 3, 32, 32, form=form)
    always(model, image)
    model(image)
    model.load_state_dict(other.state_dict())
    assert_close(model(image), other(image))
    always(model, image)
    for norm in norms_of(model):
        norm.running_var.mul_(2)
    restored = copy.deepcopy(model)
    restore(restored)
    assert_close(model(image), restored(image))


@forms
@parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_is_converted_and_on_its_own(copied, form):
    model, image, expected = example(form)
    always(model, image)
    model(image)
    twin = copied(model)
    for parameter in model.parameters():
        parameter.zero_()
    assert_close(twin(image), expected)
    restore(twin)
    assert torch.equal(twin(image), expected)


def test_runs_in_inference_mode():
    model, image, expected = example()
    with torch.inference_mode():
        always(model, image)
        assert_close(model(image), expected)
        for norm in norms_of(model):
            norm.bias.add_(1)
    assert not torch.equal(model(image), expected)
    with torch.inference_mode():
        made, image, expected = example()
        always(made, image)
        assert_close(made(image), expected)


@forms
def test_compiles_as_one_graph(form):
    model, image, expected = example(form)
    always(model, image)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(image), expected)
    for norm in norms_of(model):
        norm.bias.add_(1)
    assert_close(compiled(image), model(image))


@warnings_allowed
def test_exports():
    model, image, expected = example()
    always(model, image)
    exported = torch.export.export(model, (image,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    names = [str(node.target) for node in exported.graph.nodes]
    assert names.count("dwtir.depthwise_conv2d_fused.default") == 3
    assert_close(exported.module()(image), expected)
    assert_close(exported.module()(image[:1]), expected[:1])


@forms
def test_values_at_the_addresses_of_others(form):
    """Freed memory comes back, and what is new has versions like those before."""
    model, original, image = beside_its_original(
        chain(nn.Conv2d(64, 64, 3, groups=64), nn.BatchNorm2d(64)), 1, 64, 9, 9
    )
    image = image.contiguous(memory_format=form)
    always(model, image)
    for factor in range(1, 5):
        values = {name: value * factor for name, value in original.state_dict().items()}
        got, expected = (torch.func.functional_call(module, values, image) for module in (model, original))
        del values
        assert_close(got, expected)


def test_eps_of_a_normalisation_may_change():
    model, original, image = beside_its_original(stage())
    model(image)
    for module in (model, original):
        for norm in norms_of(module):
            norm.eps = 10.0
    assert_close(model(image), original(image))


def test_part_of_a_chain_takes_all_of_it_back():
    model, original, image = beside_its_original(chain(chain(depthwise()), nn.BatchNorm2d(6), nn.ReLU()))
    restore(model[0])
    assert torch.equal(model(image), original(image))


def test_transformations_run_the_original():
    model, original, image = beside_its_original(stage())
    images = torch.stack((image, image + 1))
    with pytest.warns(OriginalPathWarning, match="vmap, or what differentiates forwards, is at work"):
        assert_close(torch.vmap(model)(images), torch.vmap(original)(images))
    got, expected = (torch.func.jvp(module, (image,), (image,))[1] for module in (model, original))
    assert_close(got, expected)


def test_geometry_may_be_written_as_other_types():
    model, image = chain(depthwise()), image_of()
    model[0].stride, model[0].padding = 1, [1, 1]
    expected = model(image)
    always(model, image)
    for _ in range(2):
        assert_close(model(image), expected)
