"""Sampling and the Rollout: masks, positions, log-probabilities and scores, against loops over single responses."""

import contextlib
import copy
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import changed, snapshot
from small_tokenizers import NAMES, small_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from marlhf_lite.models.loading import load_base, load_tokenizer, new_policy
from marlhf_lite.tasks.answers import encode_answers, encode_continuation, encode_responses
from marlhf_lite.tasks.padding import pad
from marlhf_lite.tasks.tokenization import decode_continuation, encode_prompts
from marlhf_lite.tasks.training_rows import pair_dataset, sft_dataset
from marlhf_lite.training.rollout import Sampling, from_texts, from_tokens, generate, merged_adapter

ODD = dict(
    temperature=0.1,
    top_k=3,
    top_p=0.2,
    min_p=0.9,
    typical_p=0.3,
    epsilon_cutoff=0.1,
    eta_cutoff=0.1,
)
ODD |= dict(
    repetition_penalty=7.0, no_repeat_ngram_size=1, return_dict_in_generate=True, output_scores=True
)
ODD |= dict(
    max_length=3,
    min_length=90,
    min_new_tokens=9,
    suppress_tokens=list(range(3, 200)),
    use_cache=False,
)
ODD |= dict(
    begin_suppress_tokens=list(range(200, 400)),
    bad_words_ids=[[i] for i in range(400, 450)],
    max_time=1e-9,
)
ODD |= dict(sequence_bias=[[[450], -30.0]], forced_bos_token_id=460, forced_eos_token_id=461)
ODD |= dict(exponential_decay_length_penalty=(1, 3.0))


class Scripted(nn.Module):
    """Answers with given rows, padded as transformers pads, and keeps the arguments it was called with."""

    def __init__(self, rows, eos=None):
        super().__init__()
        self.rows, self.seen = rows, None
        self.weight = nn.Parameter(torch.zeros(1))
        self.generation_config = SimpleNamespace(eos_token_id=eos)

    def generate(self, input_ids, pad_token_id, **arguments):
        self.seen = arguments
        ids, _ = pad(self.rows, pad_token_id, left=False)
        return torch.cat([input_ids, ids], 1)


def answer(tokenizer, rows, eos=None):
    return generate(Scripted(rows, eos), tokenizer, ["a b"] * len(rows), Sampling(8))


@pytest.fixture(params=["own pad", "pad is EOS"])
def either(request, tokenizer, pad_is_eos):
    return tokenizer if request.param == "own pad" else pad_is_eos


# -- masks ------------------------------------------------------------------------------------------------------------


def test_masks_come_from_lengths(either):
    e, rows = either.eos_token_id, []
    rows = [
        [20, 21, e],
        [e],
        [20, 21, 22, 23, e],
        [20, 21, 22, 23, 24],
        [20, 21, 22, 23, either.pad_token_id],
    ]
    rollout = answer(either, rows)
    # a pad token that a model samples is a token like any other
    pad_counts = either.pad_token_id != e
    assert rollout.lengths.tolist() == [3, 1, 5, 5, 5]
    # a score is read at the last token
    columns = torch.arange(rollout.tokens.shape[1]).expand_as(rollout.tokens)
    assert (rollout.at_last_token(columns) - rollout.prompt_width).tolist() == [2, 0, 4, 4, 4]
    assert rollout.ended.tolist() == [True, True, True, False, not pad_counts]
    assert rollout.mask.tolist() == [[t < n for t in range(5)] for n in (3, 1, 5, 5, 5)]
    assert torch.equal(rollout.attention_mask[:, rollout.prompt_width :].bool(), rollout.mask)
    assert rollout.response_ids[0, :3].tolist() == rows[0]


def test_several_end_tokens(either):
    e = either.eos_token_id
    rollout = answer(either, [[20, 30, e], [20, e, 30], [20, 21, 22]], eos=[e, 30])
    assert rollout.lengths.tolist() == [2, 2, 3] and rollout.ended.tolist() == [True, True, False]


# -- texts ------------------------------------------------------------------------------------------------------------


HOSTILE = "a <eos> b<bos> <pad>"


@pytest.mark.parametrize("name", ["embedded", *NAMES])
def test_names_of_special_tokens_in_data_stay_text(name, tokenizer, tiny, tmp_path):
    """For a GemmaTokenizer, and for tokenizers of other families as AutoTokenizer reads them."""
    if name != "embedded":
        shutil.copytree(tiny.model, tmp_path / name)
        small_tokenizer(name).save_pretrained(tmp_path / name)
        tokenizer = load_tokenizer(str(tmp_path / name))
    special, starts = (
        set(tokenizer.all_special_ids) - {tokenizer.unk_token_id},
        len(tokenizer("")["input_ids"]),
    )
    (prompt,), (response,) = (
        encode_prompts(tokenizer, [HOSTILE]),
        encode_responses(tokenizer, [HOSTILE], 99),
    )
    assert not special & set(prompt[starts:]) and prompt[:starts] == tokenizer("")["input_ids"]
    assert response[-1] == tokenizer.eos_token_id and not special & set(response[:-1])
    assert tokenizer(text=[HOSTILE])["input_ids"] == [prompt]  # as TRL calls it
    rows = datasets.Dataset.from_list([{"prompt": HOSTILE, "chosen": HOSTILE, "rejected": HOSTILE}])
    assert sft_dataset(tokenizer, rows, 99)["input_ids"][0] == prompt + response
    assert pair_dataset(tokenizer, rows, 99)["rejected_ids"][0] == prompt + response
    if name == "embedded":
        assert prompt[0] == tokenizer.bos_token_id and tokenizer.decode(prompt[1:]) == HOSTILE
        assert from_texts(tokenizer, [HOSTILE], [HOSTILE], limit=99).responses == [HOSTILE]
        tokenizer.save_pretrained(tmp_path)  # a chat template writes special tokens by name
        assert (
            tokenizer.eos_token_id in AutoTokenizer.from_pretrained(tmp_path)(HOSTILE)["input_ids"]
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "form, first", [("$A <eos>", []), ("<bos> $A <eos>", ["<bos>"]), ("<bos> $A", ["<bos>"])]
)
def test_no_prompt_ends_with_eos(name, form, first, texts):
    """Of a tokenizer that puts EOS behind every text (`add_eos_token`): BOS stays, in every stage."""
    plain, tokenizer = small_tokenizer(name), copy.deepcopy(small_tokenizer(name))
    ids = [(token, plain.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=ids
    )
    assert (tokenizer("a cat")["input_ids"][-1] == tokenizer.eos_token_id) == form.endswith("<eos>")
    first = plain.convert_tokens_to_ids(first)
    prompts = [first + ids for ids in plain(texts.prompts, add_special_tokens=False)["input_ids"]]
    assert encode_prompts(tokenizer, texts.prompts) == prompts
    answers = encode_responses(plain, texts.responses, 99)
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    sides = {"chosen": texts.responses, "rejected": texts.responses}
    rows = datasets.Dataset.from_dict({"prompt": texts.prompts} | sides)
    assert (
        sft_dataset(tokenizer, rows, 99)["input_ids"][:]
        == pair_dataset(tokenizer, rows, 99)["chosen_ids"][:]
        == whole
    )
    rollout = from_texts(tokenizer, texts.prompts, texts.responses, limit=99)
    assert [
        row[m.bool()].tolist()
        for row, m in zip(rollout.tokens, rollout.attention_mask, strict=True)
    ] == whole


@pytest.mark.parametrize("name", [name for name in NAMES if name != "word_piece"])
def test_no_space_comes_between_prompt_and_answer(name):
    """Where the tokenizer puts a space before each text: tokens are those of the whole, and so is what users read."""
    tokenizer = small_tokenizer(name)
    prompts = ["def f(x):\n", "The cat:", "The cat ", "The cat\n\n"]
    for answer in ("    return x", " care", "moved", "\n\nThe old cat", "\tx = 1", "«é»", ""):
        for prompt, ids, row in zip(
            prompts, *encode_answers(tokenizer, prompts, [answer] * 4, 99), strict=True
        ):
            whole = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids + row[:-1]) == tokenizer.decode(whole), (prompt, answer)
            if whole[: len(ids)] == ids and name == "metaspace":
                assert row[:-1] == whole[len(ids) :]
            (response,) = from_tokens(
                tokenizer, [prompt], [row], [tokenizer.eos_token_id]
            ).responses
            assert response == answer or name == "merged_spaces"
            # what an environment says
            assert encode_continuation(tokenizer, [answer]) == [row[:-1]]


def test_from_texts(either, texts):
    rollout = from_texts(either, texts.prompts, texts.responses, limit=6)
    for i, (prompt, response) in enumerate(zip(texts.prompts, texts.responses)):
        expected = encode_responses(either, [response], 6)[0]
        valid = rollout.tokens[i][rollout.attention_mask[i].bool()].tolist()
        assert valid == encode_prompts(either, [prompt])[0] + expected
        assert rollout.response_ids[i][rollout.mask[i]].tolist() == expected
        assert rollout.ended[i] == (expected[-1] == either.eos_token_id)
    assert rollout.responses[0] == texts.responses[0] and rollout.responses[1] == ""
    assert not rollout.ended.all() and rollout.ended.any()


def test_a_response_of_no_token(tokenizer):
    """A server may send one: it has not ended, and its last token is the prompt's."""
    rollout = from_tokens(
        tokenizer, ["a", "Why?"], [[5, tokenizer.eos_token_id], []], [tokenizer.eos_token_id]
    )
    assert rollout.lengths.tolist() == [2, 0] and rollout.ended.tolist() == [True, False]
    assert (
        rollout.responses[1] == "" and not rollout.attention_mask[1, rollout.prompt_width :].any()
    )


# -- sampling ---------------------------------------------------------------------------------------------------------


def sampled(model, tokenizer, sampling, seed=0):
    torch.manual_seed(seed)
    return generate(model, tokenizer, ["a", "The cat sat"], sampling)


def test_top_k_and_its_absence(fresh, tokenizer):
    """top_k bounds the rank of each sampled token; 0 turns it off, where transformers would fall back on 50."""
    model, ranks = fresh(False), {}
    for k in (3, 0):
        torch.manual_seed(0)
        rollout = generate(model, tokenizer, ["a"] * 24, Sampling(4, temperature=1.5, top_k=k))
        ranks[k] = 0
        with torch.no_grad():
            logits = model(input_ids=rollout.tokens, attention_mask=rollout.attention_mask).logits
        for t in range(rollout.mask.shape[1]):
            at = rollout.prompt_width + t
            chosen = logits[:, at - 1].gather(1, rollout.tokens[:, at, None])
            rank = (logits[:, at - 1] > chosen + 1e-5).sum(1)[rollout.mask[:, t]]
            ranks[k] = max(ranks[k], int(rank.max()) if len(rank) else 0)
    assert ranks[3] <= 2 and ranks[0] > 55


@pytest.mark.parametrize(
    "sampling", [Sampling(5), Sampling(5, temperature=0), Sampling(5, top_k=0, top_p=0.9)]
)
def test_no_default_of_the_model_slips_in(tiny, tokenizer, sampling, tmp_path):
    shutil.copytree(tiny.model, tmp_path / "odd")
    greedy = sampling.temperature == 0
    more = {"do_sample": True, "num_return_sequences": 2} if greedy else {"do_sample": False}
    (tmp_path / "odd" / "generation_config.json").write_text(json.dumps(ODD | more))
    odd = replace(tiny, model=str(tmp_path / "odd"))
    # a base that is not loaded by this library
    own = AutoModelForCausalLM.from_pretrained(odd.model)
    expected = sampled(new_policy(load_base(tiny), tiny).eval(), tokenizer, sampling)
    for base in (load_base(odd), own):
        got = sampled(new_policy(base, odd).eval(), tokenizer, sampling)
        assert torch.equal(expected.tokens, got.tokens) and torch.equal(expected.mask, got.mask)


def test_each_new_token_is_one_column_of_work(fresh, tokenizer):
    model, widths = fresh(False), []
    model.get_base_model().config.use_cache = False  # as trainers leave it
    model.generation_config.use_cache = False
    model.get_base_model().model.layers[0].register_forward_hook(
        lambda _, args, out: widths.append(args[0].shape[1])
    )
    rollout = sampled(model, tokenizer, Sampling(5))
    assert widths == [rollout.prompt_width] + [1] * (rollout.mask.shape[1] - 1)


# -- sampling with merged weights -------------------------------------------------------------------------------------


def test_merged_sampling_leaves_every_weight_as_it_was(moved):
    """The very same tensors, in the policy and in the base that four models share; also after an error."""
    models = torch.nn.ModuleList([moved.policy, moved.reference, moved.critic])
    before, places = snapshot(models), [p.data_ptr() for p in models.parameters()]
    for error in (False, True):
        with contextlib.suppress(ZeroDivisionError), merged_adapter(moved.policy.model):
            assert all("base_layer" in name for name in changed(models, before))
            assert changed(models, before)
            assert not error or 1 / 0
        assert not changed(models, before) and [p.data_ptr() for p in models.parameters()] == places
        assert not any(
            layer.merged
            for layer in moved.policy.model.modules()
            if hasattr(layer, "merged_adapters")
        )


def test_merged_sampling_has_the_policys_probabilities(moved, tokenizer):
    moved.policy.eval()
    rollout = sampled(moved.policy.model, tokenizer, Sampling(6))
    inputs = (rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])
    with torch.no_grad():
        plain, _ = moved.policy(*inputs)
        reference, _ = moved.reference(*inputs)
        with merged_adapter(moved.policy.model):
            merged, _ = moved.policy(*inputs)
    torch.testing.assert_close(merged, plain, rtol=1e-4, atol=1e-4)
    assert (plain - reference)[rollout.mask].abs().max() > 1e-2


def test_a_text_is_what_its_tokens_say():
    """Some tokenizers take off spaces before punctuation as they decode: code would be other code."""
    pieces = [(piece, -1.0) for piece in ("<eos>", "▁", *"print('a.b,!)")]
    raw = Tokenizer(models.Unigram(pieces, unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    raw.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", clean_up_tokenization_spaces=True
    )
    text = " print('a .b', ' ! ')"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) != text == decode_continuation(tokenizer, [ids])[0]
