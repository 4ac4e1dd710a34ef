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
from marlhf_lite.lab.corpora import tiny_tldr as embedded
from marlhf_lite.lab.corpora.tiny_tldr import (
    RATER_SHARPNESS,
    Quality,
    make_post,
    make_summary,
)
from marlhf_lite.models.loading import EMBEDDED_MODEL, load_base, load_tokenizer, new_policy
from marlhf_lite.tasks.files import read_file
from marlhf_lite.tasks.tiny_tldr.gold import FREE_WORDS, LONG, PADDING, WRONG, gold_scores, inspect
from marlhf_lite.tasks.tiny_tldr.grammar import (
    FACTS,
    FILLERS,
    LEXICON,
    detokenize,
    fill,
    grammar,
    sentence,
    slots,
    subject,
)
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


@pytest.fixture(scope="module")
def parser():
    return nltk.ChartParser(grammar())


def told(count):
    """Sentence trees of posts and of summaries, `count` each."""
    rng, of_posts, of_summaries = random.Random(11), [], []
    while min(len(of_posts), len(of_summaries)) < count:
        post = make_post(rng)
        of_posts += post.trees
        of_summaries += make_summary(rng, post, Quality.sample(rng))
    return of_posts[:count], of_summaries[:count]


def test_every_sentence_parses_to_its_tree(parser):
    for kind in told(100):
        for tree in kind:
            assert tree in list(parser.parse(tree.leaves())), detokenize(tree)


def test_every_template_is_reached(parser):
    """All fillers, fact kinds, openers and pronouns of the grammar appear in generated text."""
    text = " ".join(row["prompt"] + row["chosen"] + row["rejected"] for row in PAIRS)
    for filler in FILLERS:
        assert detokenize(fill(filler)) in text
    for kind, template in FACTS.items():
        assert f" {fill(template, ('x',) * len(slots(template))).leaves()[0]} " in text, kind
    for word in ("On top of that", "To be honest", " She ", " he ", " they "):
        assert word in text


def test_sentences_outside_the_grammar_do_not_parse(parser):
    for words in ("moved My sister to Marwick .", "She moved to .", "She and moved ."):
        assert not list(parser.parse(words.split()))


def test_prompts_hold_the_text_of_the_trees():
    for post in posts(50):
        body = " ".join(" ".join(tree.leaves()) for tree in post.trees).replace(" .", ".")
        assert post.prompt == f"POST Subreddit: r/{post.subreddit}\n{body}\nTL;DR:"


def test_every_word_is_a_leaf():
    for row in PAIRS[:50]:
        for text in (row["chosen"], row["rejected"]):
            assert text.startswith(" ") and text.endswith(".") and "  " not in text and " ." not in text


# Gold scorer, against counts taken while the text is made


def write(post, facts, fillers=(), who_again=0):
    """A summary that states `facts` in order, one a sentence, and the gold score it should get."""
    trees, true = [], set(post.facts)
    for i, (kind, values) in enumerate(facts):
        trees.append(sentence(subject(post.who, i <= who_again), [fill(FACTS[kind], values)]))
    trees += [fill(FILLERS[i]) for i in fillers]
    text = " " + " ".join(map(detokenize, trees))
    right = 1 + len(set(facts) & true)
    repeats = len(facts) - len(set(facts)) + min(who_again, len(facts) - 1)
    excess = max(0, sum(len(tree.leaves()) - 1 for tree in trees) - FREE_WORDS)  # the full stop is no word
    score = right - WRONG * len(set(facts) - true) - PADDING * (repeats + len(fillers)) - LONG * excess
    return text, score


def gold(post, text):
    return gold_scores([post.prompt], [text])[0]


def test_perfect_summary_scores_its_facts():
    for post in posts(100):
        text = embedded.summary_text(make_summary(random.Random(0), post, Quality(cover=1, wrong=0, filler=0)))
        report = inspect(post.prompt, text)
        assert (report.correct, report.wrong, report.padding, report.total) == (6, 0, 0, 6)
        assert report.coverage == 1 and report.wrong == 0
        assert report.words <= FREE_WORDS + 6
        assert gold(post, text) == pytest.approx(6 - LONG * max(0, report.words - FREE_WORDS))


def other_values(rng, kind, values):
    """Values of the same kind with one of them changed."""
    i = rng.randrange(len(values))
    word = rng.choice([w for w in LEXICON[slots(FACTS[kind])[i]] if w != values[i]])
    return values[:i] + (word,) + values[i + 1 :]


def test_random_summaries_score_as_counted():
    rng = random.Random(2)
    for post in posts(300, seed=1):
        facts = rng.sample(post.facts, rng.randint(1, 5))
        facts = [(k, other_values(rng, k, v) if rng.random() < 0.3 else v) for k, v in facts]
        facts += rng.choices(facts, k=rng.randint(0, 3))  # repeats
        fillers = rng.sample(range(len(FILLERS)), rng.randint(0, 4))
        text, score = write(post, facts, fillers, who_again=rng.randint(0, 2))
        assert gold(post, text) == pytest.approx(score), text


def test_generated_summaries_score_as_counted(monkeypatch):
    """`make_summary` itself, its facts and fillers noted on the way out."""
    noted = {}
    tell = embedded._tell

    def note(rng, who, facts, *args, **kwargs):
        trees = tell(rng, who, facts, *args, **kwargs)
        noted["facts"], noted["trees"] = facts, trees
        return trees

    monkeypatch.setattr(embedded, "_tell", note)
    rng, filler_trees = random.Random(5), [fill(f) for f in FILLERS]
    for _ in range(200):
        post = make_post(rng)
        text = embedded.summary_text(make_summary(rng, post, Quality.sample(rng)))
        facts, true = set(noted["facts"]), set(post.facts)
        score = 1 + len(facts & true) - WRONG * len(facts - true)
        score -= PADDING * sum(tree in filler_trees for tree in noted["trees"])
        assert gold(post, text) == pytest.approx(score - LONG * max(0, len(text.split()) - FREE_WORDS))


def test_the_wrong_person_counts_against():
    (post,) = posts(1)
    right = gold(post, write(post, post.facts[:1])[0])
    other = ("aunt" if post.who[0] != "aunt" else "boss", post.who[1])
    text = " " + detokenize(sentence(subject(other, True), [fill(FACTS[post.facts[0][0]], post.facts[0][1])]))
    assert right == 2 and gold(post, text) == 0


def test_a_fact_of_another_kind_counts_against():
    (post,) = posts(1)
    kind = next(k for k in FACTS if k not in dict(post.facts))
    values = tuple(LEXICON[slot][0] for slot in slots(FACTS[kind]))
    assert gold(post, write(post, [(kind, values)])[0]) == 1 - WRONG


def test_repeating_and_padding_never_pay():
    (post,) = posts(1)
    once, score = write(post, post.facts)
    assert gold(post, once) == pytest.approx(score)
    assert gold(post, once + once) < score
    assert gold(post, once * 20) < gold(post, once + once)
    assert gold(post, once + " " + detokenize(fill(FILLERS[0]))) < score
    assert gold(post, once + " word" * 100) <= score - LONG * 100


@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", "!?.", "\0"])
def test_empty_and_bare_marks(text):
    (post,) = posts(1)
    assert gold(post, text) == (-PADDING if text == "\0" else 0)


def test_foreign_text_scores_as_padding():
    (post,) = posts(1)
    assert gold(post, " La casa es azul. El perro come!") == -2 * PADDING
    assert gold_scores(["no post at all"], [" My sister Marla moved to Marwick."]) == [-2 * WRONG]
    assert gold_scores([], []) == []


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_gold_takes_any_text(prompt, response):
    (score,) = gold_scores([prompt], [response])
    assert math.isfinite(score) and score <= inspect(prompt, response).total


WORDS = "My sister Marla moved to Marwick and . , waited 12 days owed me dollars\n".split(" ")


@given(st.lists(st.sampled_from(WORDS)))
@settings(max_examples=200, deadline=None)
def test_gold_takes_any_words_of_the_corpus(words):
    prompt = posts(1)[0].prompt
    assert math.isfinite(gold_scores([prompt], [" ".join(words)])[0])


def test_gold_is_quick_on_long_text():
    (post,) = posts(1)
    assert gold(post, " moved to" * 20_000) < -1000
    assert gold(post, " " * 50_000 + "\n" * 50_000) == 0


# Labels


def test_labels_follow_bradley_terry():
    prompts = [row["prompt"] for row in PAIRS]
    chosen, rejected = (gold_scores(prompts, [row[side] for row in PAIRS]) for side in ("chosen", "rejected"))
    gaps = [a - b for a, b in zip(chosen, rejected) if abs(a - b) > 1e-9]
    chances = [1 / (1 + math.exp(-RATER_SHARPNESS * abs(gap))) for gap in gaps]
    agreed = mean(gap > 0 for gap in gaps)
    spread = math.sqrt(sum(p * (1 - p) for p in chances)) / len(chances)
    assert agreed == pytest.approx(mean(chances), abs=4 * spread)
    assert 0.65 <= agreed <= 0.9  # raters err, but not so much that nothing can be learned
    assert len(gaps) > 0.8 * len(PAIRS)  # few ties
    for low, high in ((0, 1), (1, 2), (2, 4), (4, 20)):  # and not only on average
        inside = [(gap > 0, p) for gap, p in zip(gaps, chances) if low < abs(gap) <= high]
        assert mean(won for won, _ in inside) == pytest.approx(mean(p for _, p in inside), abs=0.08)


def test_first_and_second_summary_are_alike():
    """Which of the two is better says nothing about which was written first, and length alone does not give it away."""
    assert all(row["chosen"] != row["rejected"] for row in PAIRS)
    longer = mean(len(row["chosen"]) > len(row["rejected"]) for row in PAIRS)
    assert 0.4 < longer < 0.7


# Tokenizer and model


def test_responses_are_long_enough_and_prompts_fit(tokenizer):
    responses = [row[side] for row in PAIRS[:500] for side in ("chosen", "rejected")]
    lengths = [len(ids) for ids in encode_responses(tokenizer, responses, 10_000)]
    assert mean(lengths) >= 45
    assert mean(length <= 96 for length in lengths) > 0.95  # the default --max_response_length
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in PAIRS[:500]])
    assert max(map(len, prompts)) <= 512


def round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])


@given(text=TEXT)
@settings(max_examples=300, deadline=None)
def test_any_text_round_trips(tokenizer, text):
    assert round_trip(tokenizer, text) == text
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "  two  spaces ", "a\nb\n\n c", "\r\n\t\0", "é ß 中文 עברית \u202e", "🦜 \u200d", "it ' s .", "e\u0301"],
)
def test_chosen_texts_round_trip(tokenizer, text):
    assert round_trip(tokenizer, text) == text


def test_corpus_round_trips_without_byte_tokens(tokenizer):
    texts = [row["prompt"] + row["chosen"] for row in PAIRS[:100]]
    for text, ids in zip(texts, tokenizer(texts)["input_ids"]):
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    used = {token for ids in tokenizer(texts)["input_ids"] for token in tokenizer.convert_ids_to_tokens(ids)}
    rare = {token for token in used if token.startswith("<0x")}
    assert len(rare) <= 3, rare


def test_bos_once_and_only_before_prompts(tokenizer):
    for ids in encode_prompts(tokenizer, ["", "x", PAIRS[0]["prompt"]]):
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    (response,) = encode_responses(tokenizer, [PAIRS[0]["chosen"]], 200)
    assert tokenizer.bos_token_id not in response
    assert response[-1] == tokenizer.eos_token_id and response.count(tokenizer.eos_token_id) == 1
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_digits_are_single_tokens(tokenizer):
    ids = tokenizer("owed me 4096 dollars", add_special_tokens=False)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert [token for token in tokens if any(c.isdigit() for c in token)] == ["4", "0", "9", "6"]


@pytest.fixture(scope="module")
def model():
    return load_base(ModelConfig())


def test_embedded_model_is_small_and_fits_its_tokenizer(model, tokenizer):
    assert model.config.model_type == "gemma"
    assert model.get_input_embeddings().num_embeddings >= len(tokenizer)
    assert sum(p.numel() for p in model.parameters()) < 10e6
    assert not any(p.requires_grad for p in model.parameters())


def test_embedded_model_has_learned_the_corpus(model, tokenizer):
    """Pretrained: it gives real posts far more than the uniform probability of a token."""
    ids = tokenizer(PAIRS[0]["prompt"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < 0.6 * math.log(len(tokenizer))


def test_embedded_model_answers_foreign_prompts(model, tokenizer):
    prompts = ["", "\n\nHuman: Что нового? 中文 🦜\n\nAssistant:", "x" * 200, PAIRS[0]["prompt"]]
    torch.manual_seed(0)
    rollout = generate(model, tokenizer, prompts, Sampling(12))
    assert rollout.prompts == prompts and len(rollout.responses) == 4
    assert all(isinstance(text, str) for text in rollout.responses)
    assert (rollout.lengths >= 1).all() and (rollout.lengths <= 12).all()
    assert all(map(math.isfinite, gold_scores(prompts, rollout.responses)))


def test_embedded_model_is_found_by_name():
    assert ModelConfig().model == EMBEDDED_MODEL


def test_after_a_little_sft_the_embedded_model_states_facts_right(tmp_path):
    """Copying is what there is to credit besides length: at least 70 % of the facts stated for new posts are right."""
    options, rng = ModelConfig(), random.Random("facts")
    tokenizer, base = load_tokenizer(options.model), load_base(options)
    good = [make_post(rng) for _ in range(64)]
    best = Quality(cover=0.9, wrong=0.0, filler=0.1)
    rows = [{"prompt": p.prompt, "chosen": embedded.summary_text(make_summary(rng, p, best))} for p in good]
    policy = new_policy(base, options)
    train_sft(policy, tokenizer, datasets.Dataset.from_list(rows), SFTStageConfig(sft_epochs=2), DataConfig(), tmp_path)
    policy.eval()
    torch.manual_seed(0)
    rollout = generate(policy, tokenizer, [make_post(rng).prompt for _ in range(48)], Sampling(96))
    reports = [inspect(p, r) for p, r in zip(rollout.prompts, rollout.responses, strict=True)]
    right, wrong = sum(r.correct for r in reports), sum(r.wrong for r in reports)
    assert right + wrong > 48 * 3 and right / (right + wrong) >= 0.7
    assert rollout.lengths.float().mean() >= 45
