"""The sharded model against transformers' own, one document at a time."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tunewright.contract.failures import UserError
from tunewright.training import attention, weights
from tunewright.training.attention import described
from tunewright.training.base import find_base
from tunewright.training.batches import Shape, to_batch
from tunewright.training.model import build, decoder_layers, inference, keep_whole, only
from tunewright.training.step import loss_sum
from tunewright.training.timing import compiled_graphs

ARCHITECTURES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "layer_types": None},
    "phi": {},
    "phi3": {},
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm(tensors) -> float:
    return torch.stack([tensor.norm() for tensor in tensors]).norm().item()


def plain_twin(model):
    """The same model as transformers builds it, unsharded, with the mask-free eager attention."""
    from transformers import AutoModelForCausalLM

    twin = AutoModelForCausalLM.from_config(
        model.module.config, dtype=torch.float32, attn_implementation="eager"
    )
    twin.load_state_dict({n: whole(p.detach()) for n, p in model.parameters.items()}, strict=False)
    twin.tie_weights()
    return twin


def one_by_one(twin, packs) -> torch.Tensor:
    """Summed loss of every document fed alone, its labels shifted by hand."""
    total = torch.zeros(())
    for pack in packs:
        ends = list(itertools.accumulate(pack.lengths.tolist()))
        for start, end in zip([0, *ends], ends, strict=False):
            ids = torch.from_numpy(pack.input_ids[start:end])[None]
            labels = torch.from_numpy(pack.supervised[start:end].copy())[1:]
            logits = twin(input_ids=ids, use_cache=False).logits[0, :-1][labels]
            total = total + F.cross_entropy(logits, ids[0, 1:][labels], reduction="sum")
    return total


# Phi adds a bias to its logits, which are then a view; nothing here writes into them.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDP")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_rows_give_the_loss_and_gradients_of_single_documents(
    name, alone, model_folder, settings, packs
):
    chosen = settings(model_name=str(model_folder(name.split("-")[0], **ARCHITECTURES[name])))
    model = build(find_base(chosen), chosen, alone)
    twin = plain_twin(model)
    assert len(decoder_layers(model.module)) == 2
    assert all(isinstance(p, DTensor) for p in model.parameters.values())
    assert described(model.module).endswith(" mask")

    packed, separate = loss_sum(model, to_batch(packs)), one_by_one(twin, packs)
    packed.backward()
    separate.backward()

    assert packed.item() == pytest.approx(separate.item(), rel=1e-6)
    twins = dict(twin.named_parameters())
    assert model.parameters.keys() == twins.keys()
    apart = [whole(p.grad) - twins[n].grad for n, p in model.parameters.items()]
    assert norm(apart) <= 1e-6 * norm([p.grad for p in twins.values()])


def test_recomputation_changes_neither_loss_nor_gradient(alone, model_folder, settings, packs):
    found = []
    for recompute in (False, True):
        chosen = settings(model_name=str(model_folder()), gradient_checkpointing=recompute)
        model = build(find_base(chosen), chosen, alone)
        loss = loss_sum(model, to_batch(packs))
        loss.backward()
        found.append([loss.detach(), *(whole(p.grad) for p in model.parameters.values())])
    assert decoder_layers(model.module)[0].gradient_checkpointing
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def results(model, batches):
    """Loss and gradients of micro-batches, as a step gathers them."""
    losses = []
    for place, batch in enumerate(batches):
        model.accumulate(last=place == len(batches) - 1)
        losses.append(loss_sum(model, batch))
        losses[-1].backward()
    return [sum(losses).detach(), *(whole(p.grad) for p in model.parameters.values())]


def test_weights_kept_whole_in_a_step_change_nothing(alone, model_folder, settings, packs):
    found = []
    for keep in (False, True):
        chosen = settings(model_name=str(model_folder()))
        model = build(find_base(chosen), chosen, alone)
        model = keep_whole(model) if keep else model
        found.append(results(model, [to_batch([pack]) for pack in packs]))
        # Between steps they are shards again, so that the optimizer changes what counts.
        assert all(isinstance(p, DTensor) for p in model.module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_and_padding_give_the_same_loss_and_gradients(
    recompute, alone, model_folder, settings, packs
):
    found = []
    for compiled in (False, True):
        chosen = settings(
            model_name=str(model_folder()), compile=compiled, gradient_checkpointing=recompute
        )
        model = build(find_base(chosen), chosen, alone)
        shape = Shape(tokens=40, longest=16) if compiled else None
        before = compiled_graphs()
        found.append(results(model, [to_batch([pack], shape) for pack in packs]))
        # It did run as one program, FSDP or not.
        assert (compiled_graphs() > before) == compiled
    for ours, plain in zip(*found, strict=True):
        assert (ours - plain).norm() <= 2e-6 * plain.norm()


@pytest.mark.parametrize("rows", ["own", "handed out", "whole"])
def test_weights_come_the_same_way_whoever_reads_them(
    rows, alone, model_folder, settings, tmp_path, monkeypatch
):
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder()))
    theirs.save_pretrained(tmp_path / "weights", max_shard_size="20KB")
    if rows == "handed out":
        monkeypatch.setattr(weights, "_all_see", lambda *_: False)
    elif rows == "whole":
        monkeypatch.setattr(weights, "_fits", lambda *_: False)
    chosen = settings(model_name=str(tmp_path / "weights"), init="pretrained")
    ours = build(find_base(chosen), chosen, alone)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(whole(ours.parameters[name].detach()), parameter)


def test_another_model_of_the_same_size_is_told_apart(tmp_path):
    for name, last in (("one", 1.0), ("other", 2.0)):
        numbers = torch.ones(1 << 20)
        numbers[-1] = last
        (tmp_path / name).mkdir()
        save_file({"weight": numbers}, tmp_path / name / "model.safetensors")
    one, other = (weights._seen(tmp_path / name) for name in ("one", "other"))
    assert one != other
    assert [file[:2] for file in one] == [file[:2] for file in other]
    (tmp_path / "other" / "model.safetensors").write_bytes(
        (tmp_path / "one" / "model.safetensors").read_bytes()
    )
    assert weights._seen(tmp_path / "other") == one
    assert weights._seen(tmp_path / "nowhere") == ()


def test_a_torn_weight_file_is_named(alone, model_folder, settings, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "weights"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder())).save_pretrained(
        folder
    )
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    chosen = settings(model_name=str(folder), init="pretrained")
    with pytest.raises(UserError, match=r"weights cannot be loaded: "):
        build(find_base(chosen), chosen, alone)


def test_a_batch_without_labels_gives_zero_gradients(alone, model_folder, settings, packs):
    chosen = settings(model_name=str(model_folder()))
    model = build(find_base(chosen), chosen, alone)
    batch = to_batch([pack._replace(supervised=pack.supervised & False) for pack in packs])
    loss = loss_sum(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(not whole(p.grad).any() for p in model.parameters.values())


def test_pretrained_weights_give_the_logits_of_transformers(
    alone, model_folder, settings, packs, tmp_path
):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(model_folder(tie_word_embeddings=True))
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "weights")
    chosen = settings(model_name=str(tmp_path / "weights"), init="pretrained")
    ours = build(find_base(chosen), chosen, alone)

    ids = torch.from_numpy(packs[0].input_ids[:7])[None]
    with inference(ours), torch.no_grad():
        logits = ours.module(input_ids=ids, use_cache=False).logits
    assert torch.allclose(logits, theirs(ids).logits, rtol=0, atol=1e-6)
    assert ours.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in ours.parameters
    assert ours.count == sum(p.numel() for p in theirs.parameters())


def test_after_inference_parameters_are_shards_again(alone, model_folder, settings, packs):
    chosen = settings(model_name=str(model_folder()))
    model = build(find_base(chosen), chosen, alone)
    with inference(model):
        loss_sum(model, to_batch(packs))
    assert all(isinstance(p, DTensor) for p in model.module.parameters())


def test_random_weights_follow_from_the_seed(alone, model_folder, settings):
    folder = str(model_folder())

    def weights(seed):
        chosen = settings(model_name=folder, seed=seed)
        return whole(build(find_base(chosen), chosen, alone).parameters["lm_head.weight"])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_matmul_parameters_leave_out_the_embedding_table_but_not_a_tied_one(
    alone, model_folder, settings
):
    def counts(**more):
        chosen = settings(model_name=str(model_folder(**more)))
        model = build(find_base(chosen), chosen, alone)
        return model.matmul_count

    assert counts(tie_word_embeddings=True) == counts(tie_word_embeddings=False)


def test_a_model_whose_documents_see_each_other_is_refused(alone, model_folder, settings):
    # Its short convolutions run over the borders of documents.
    folder = model_folder("lfm2", layer_types=["conv", "full_attention"])
    chosen = settings(model_name=str(folder))
    with pytest.raises(UserError, match="packed rows see each other"):
        build(find_base(chosen), chosen, alone)


def test_a_folder_without_weights_is_named(model_folder, settings):
    chosen = settings(model_name=str(model_folder()), init="pretrained")
    with pytest.raises(UserError, match=r"has no weights .* set init: random"):
        find_base(chosen)


def test_a_folder_that_is_not_there_is_named(settings):
    with pytest.raises(UserError, match=r"there is no folder \./nowhere"):
        find_base(settings(model_name="./nowhere"))


def test_weights_of_another_config_are_refused(alone, model_folder, settings, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    small = AutoConfig.from_pretrained(model_folder())
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "weights")
    small.num_hidden_layers = 3
    small.save_pretrained(tmp_path / "weights")
    chosen = settings(model_name=str(tmp_path / "weights"), init="pretrained")
    with pytest.raises(UserError, match=r"has no weights for model\.layers\.2"):
        build(find_base(chosen), chosen, alone)


def test_a_vocabulary_larger_than_the_embeddings_is_refused(alone, model_folder, settings):
    chosen = settings(model_name=str(model_folder()))
    model = build(find_base(chosen), chosen, alone)
    model.require_vocabulary(64)
    with pytest.raises(UserError, match="ids up to 64, but the model has 64 embeddings"):
        model.require_vocabulary(65)


def test_codes_that_need_a_scale_are_not_taken_for_weights(model_folder, tmp_path):
    shapes = {"a.weight": (2, 2)}
    codes = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    assert not weights._fits(tmp_path, shapes, "it")
    save_file({"a.weight": torch.ones(2, 2).bfloat16()}, tmp_path / "model.safetensors")
    assert weights._fits(tmp_path, shapes, "it")


def test_layers_that_give_tuples_can_be_left_out(alone, model_folder, settings):
    folder = model_folder("falcon", new_decoder_architecture=True, num_kv_heads=2)
    chosen = settings(model_name=str(folder))
    model = build(find_base(chosen), chosen, alone)
    with inference(model), only(model.module, [0]):
        assert attention.probe(model.module, alone.device).shape == (1, 16, 64)
