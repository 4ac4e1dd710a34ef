"""The embedded task: its grammar, its truth, its raters, and the embedded tokenizer and model it is made for."""

import math
import random
from statistics import mean

import datasets
import nltk
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlhf_lite.config.options import DataConfig, ModelConfig, SFTStageConfig
from marlhf_lite.lab.corpora.tiny_tldr import Quality, make_post, make_summary, summary_text
from marlhf_lite.models.loading import load_base, load_tokenizer, new_policy
from marlhf_lite.tasks.files import read_file
from marlhf_lite.tasks.tiny_tldr import grammar as g
from marlhf_lite.tasks.tiny_tldr.gold import FREE_WORDS, LONG, PADDING, WRONG, gold_scores, inspect
from marlhf_lite.tasks.tokenization import encode_prompts, encode_responses
from marlhf_lite.training.rollout import Sampling, generate
from marlhf_lite.training.sft import train_sft
from marlhf_lite.utils.shipped import shipped

PAIRS = read_file(shipped("tiny-tldr.jsonl.gz"))[:2000]
SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>", "<mask>")
# Tokenizers of this family write a space as U+2581, so that character alone does not come back.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=80).filter(
    lambda text: not any(token in text for token in SPECIAL)
)


def posts(count, seed=0):
    rng = random.Random(seed)
    return [make_post(rng) for _ in range(count)]


# Grammar


def test_every_sentence_parses_to_its_tree():
    rng, parser = random.Random(11), nltk.ChartParser(g.grammar())
    for post in posts(30, seed=11):
        for tree in [*post.trees, *make_summary(rng, post, Quality.sample(rng))]:
            assert tree in list(parser.parse(tree.leaves())), g.detokenize(tree)


def test_every_template_is_reached():
    """All fillers, fact kinds, openers and pronouns of the grammar appear in generated text."""
    text = " ".join(row["prompt"] + row["chosen"] + row["rejected"] for row in PAIRS)
    kinds = [g.fill(template, ("x",) * len(g.slots(template))).leaves()[0] for template in g.FACTS.values()]
    words = ["On top of that", "To be honest", " She ", " he ", " they ", *(f" {kind} " for kind in kinds)]
    assert not [word for word in [*words, *(g.detokenize(g.fill(filler)) for filler in g.FILLERS)] if word not in text]


# Gold scorer, against counts taken while the text is made


def write(post, facts, fillers=(), who_again=0):
    """A summary that states `facts` in order, one a sentence, and the gold score it should get."""
    trees, true = [], set(post.facts)
    for i, (kind, values) in enumerate(facts):
        trees.append(g.sentence(g.subject(post.who, i <= who_again), [g.fill(g.FACTS[kind], values)]))
    trees += [g.fill(g.FILLERS[i]) for i in fillers]
    text = " " + " ".join(map(g.detokenize, trees))
    right = 1 + len(set(facts) & true)
    repeats = len(facts) - len(set(facts)) + min(who_again, len(facts) - 1)
    excess = max(0, sum(len(tree.leaves()) - 1 for tree in trees) - FREE_WORDS)  # the full stop is no word
    score = right - WRONG * len(set(facts) - true) - PADDING * (repeats + len(fillers)) - LONG * excess
    return text, score


def gold(post, text):
    return gold_scores([post.prompt], [text])[0]


def test_perfect_summary_scores_its_facts():
    for post in posts(100):
        text = summary_text(make_summary(random.Random(0), post, Quality(cover=1, wrong=0, filler=0)))
        report = inspect(post.prompt, text)
        assert (report.correct, report.wrong, report.padding, report.total, report.coverage) == (6, 0, 0, 6, 1)
        assert report.words <= FREE_WORDS + 6
        assert gold(post, text) == pytest.approx(6 - LONG * max(0, report.words - FREE_WORDS))


def test_random_summaries_score_as_counted():
    rng = random.Random(2)
    for post in posts(300, seed=1):
        facts = [
            (k, tuple(rng.choice(g.LEXICON[slot]) for slot in g.slots(g.FACTS[k])) if rng.random() < 0.3 else v)
            for k, v in rng.sample(post.facts, rng.randint(1, 5))
        ]
        facts += rng.choices(facts, k=rng.randint(0, 3))  # repeats
        fillers = rng.sample(range(len(g.FILLERS)), rng.randint(0, 4))
        text, score = write(post, facts, fillers, who_again=rng.randint(0, 2))
        assert gold(post, text) == pytest.approx(score), text


def test_repeating_and_padding_never_pay():
    (post,) = posts(1)
    once, score = write(post, post.facts)
    assert gold(post, once) == pytest.approx(score)
    assert gold(post, once * 20) < gold(post, once + once) < score
    assert gold(post, once + " " + g.detokenize(g.fill(g.FILLERS[0]))) < score
    assert gold(post, once + " word" * 100) <= score - LONG * 100


OTHER = {  # text -> score
    **dict.fromkeys(("", " ", "\n\n", "...", "!?.", " " * 50_000 + "\n" * 50_000), 0),
    "\0": -PADDING,
    " La casa es azul. El perro come!": -2 * PADDING,
    " My sister Nobody moved to Nowhere.": -2 * WRONG,  # another person, and what she did not do
}


@pytest.mark.parametrize(("text", "score"), OTHER.items(), ids=[repr(text[:20]) for text in OTHER])
def test_other_texts(text, score):
    assert gold(posts(1)[0], text) == score and gold_scores(["no post at all"], [text]) == [score]


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_gold_takes_any_text(prompt, response):
    (score,) = gold_scores([prompt], [response])
    assert math.isfinite(score) and score <= inspect(prompt, response).total


# Tokenizer and model


def test_responses_are_long_enough_and_prompts_fit(tokenizer):
    responses = [row[side] for row in PAIRS[:500] for side in ("chosen", "rejected")]
    lengths = [len(ids) for ids in encode_responses(tokenizer, responses, 10_000)]
    assert mean(lengths) >= 45
    assert mean(length <= 96 for length in lengths) > 0.95  # the default --max_response_length
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in PAIRS[:500]])
    assert max(map(len, prompts)) <= 512


@given(text=TEXT)
@settings(max_examples=300, deadline=None)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_bos_once_and_only_before_prompts(tokenizer):
    for ids in encode_prompts(tokenizer, ["", "x", PAIRS[0]["prompt"]]):
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    (response,) = encode_responses(tokenizer, [PAIRS[0]["chosen"]], 200)
    assert tokenizer.bos_token_id not in response
    assert response[-1] == tokenizer.eos_token_id and response.count(tokenizer.eos_token_id) == 1
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_digits_are_single_tokens(tokenizer):
    tokens = tokenizer.tokenize("owed me 4096 dollars")
    assert [token for token in tokens if any(c.isdigit() for c in token)] == ["4", "0", "9", "6"]


def test_embedded_model_answers_foreign_prompts(tokenizer):
    prompts = ["", "\n\nHuman: Что нового? 中文 🦜\n\nAssistant:", "x" * 200, PAIRS[0]["prompt"]]
    torch.manual_seed(0)
    rollout = generate(load_base(ModelConfig()), tokenizer, prompts, Sampling(12))
    assert rollout.prompts == prompts and len(rollout.responses) == 4
    assert all(isinstance(text, str) for text in rollout.responses)
    assert (rollout.lengths >= 1).all() and (rollout.lengths <= 12).all()
    assert all(map(math.isfinite, gold_scores(prompts, rollout.responses)))


def test_after_a_little_sft_the_embedded_model_states_facts_right(tmp_path):
    """Copying is what there is to credit besides length: at least 70 % of the facts stated for new posts are right."""
    options, rng = ModelConfig(), random.Random("facts")
    tokenizer, base = load_tokenizer(options.model), load_base(options)
    good = [make_post(rng) for _ in range(64)]
    best = Quality(cover=0.9, wrong=0.0, filler=0.1)
    rows = [{"prompt": p.prompt, "chosen": summary_text(make_summary(rng, p, best))} for p in good]
    policy = new_policy(base, options)
    train_sft(policy, tokenizer, datasets.Dataset.from_list(rows), SFTStageConfig(sft_epochs=2), DataConfig(), tmp_path)
    policy.eval()
    torch.manual_seed(0)
    rollout = generate(policy, tokenizer, [make_post(rng).prompt for _ in range(48)], Sampling(96))
    reports = [inspect(p, r) for p, r in zip(rollout.prompts, rollout.responses, strict=True)]
    right, wrong = sum(r.correct for r in reports), sum(r.wrong for r in reports)
    assert right + wrong > 48 * 3 and right / (right + wrong) >= 0.7
    assert rollout.lengths.float().mean() >= 45
