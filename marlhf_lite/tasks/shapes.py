"""The shapes of rows that users of TRL, LLaMA-Factory and OpenRLHF have, and how they become rows of a task.

The first of `SHAPES` whose columns are all present is taken, and the run says which.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from marlhf_lite.tasks import templates
from marlhf_lite.tasks.chats import Chat
from marlhf_lite.tasks.messages import Turns, messages_of, turns_of_text, write_transcript
from marlhf_lite.tasks.prompts import ROW
from marlhf_lite.tasks.templates import (
    ASSISTANT,
    COLUMNS,
    DROPPED,
    HUMAN,
    WITHOUT_PAIRS,
    BadRow,
    Form,
)
from marlhf_lite.tasks.written_lists import refuse_written_lists
from marlhf_lite.utils.errors import InputError, did_you_mean

# names of prompts that may have an `input` below them (Alpaca)
INSTRUCTIONS = ("instruction", "question", "query")
PROMPT_NAMES = ("prompt", *INSTRUCTIONS, "input", "context_messages")
ANSWER_NAMES = ("completion", "response", "output", "answer")
LABELS = ("label", "kto_tag")  # in the data of KTO: whether to learn an answer
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
MOST_WORDS_OF_A_NAME = 4  # of a column: a longer one is probably a text
TARGETS = (*COLUMNS, "completion", "messages", "system")  # what `--columns` may name
# Names of answers of which one is better: without chosen and rejected, the names do not tell which. A word that says
# which is better counts only beside words that name an answer, so that `preferred_language` is a column like any other.
_SAYS_WHICH_IS_BETTER = re.compile(
    r"(?i)(is|non|dis)?(chosen|rejected|(dis)?prefer(red|ence)?|winner|loser|better|worse)"
)
_NAMES_AN_ANSWER = re.compile(
    r"(?i)(response|answer|completion|output|text|message|conversation|reply|ref|id|non|is|the|human|[abjk]|\d+)s?"
)
_ONE_OF_SEVERAL_ANSWERS = re.compile(
    r"(?i)(response|answer|completion|output|ref)s?_?([abjk\d]|good|bad)$"
)
# Two columns of which one names the better answer and the other the worse one, if both are there.
OPPOSITES = (
    ("win", "lose"),
    ("won", "lost"),
    ("good", "bad"),
    ("best", "worst"),
    ("positive", "negative"),
    ("pos", "neg"),
    ("accept", "reject"),
    ("y_w", "y_l"),
    ("w", "l"),
)
# Takes the place of a template if a chat template is there and most rows are text: texts stay as they are, and the few
# rows of messages are bad rows. Written by the chat template, they would be in another form than all other prompts.
ONLY_TEXTS = "only texts"


# Rows of a shape


def _convert_row(
    row: Mapping,
    template: str | Chat = "paper",
    answer_columns: Sequence[str] = ("chosen", "rejected"),
) -> dict[str, str]:
    """Return the prompt and the answers of a row as texts: `prompt`, `chosen` and `rejected`; a single one is `chosen`.

    `answer_columns` are two for pairs, one for SFT, and none if there are only prompts.

    Texts stay as they are, except for white space at the end of an answer. Messages are written by the chat template,
    or, if there is none, as a transcript. If the choice of the chat template is `text`, it also writes a row of texts:
    the prompt becomes a message of the user. If `template` is `ONLY_TEXTS`, no messages are written.

    Raises `BadRow` if the row is not of a kind that is written, or has a fault.
    """
    columns = ("prompt", *answer_columns)
    has_messages = any(isinstance(row.get(column), list | dict) for column in columns)
    has_chat_template = isinstance(template, Chat)
    if has_messages:
        if template == ONLY_TEXTS:
            raise BadRow("bad_chat", "messages, but most rows are text")
        prompt, answers = _write_row(row, answer_columns, template)
    else:
        row = _with_prompt(row, answer_columns)
        if not has_chat_template:
            prompt = row["prompt"]
            answers = [row[column].rstrip() for column in answer_columns]
        elif template.choice == "text":
            prompt, answers = _write_row(row, answer_columns, template)
            # `_write_row` noted the messages that it made of the prompt; a user's function gets the row's text.
            template.source_of_prompt[prompt] = row["prompt"]
        else:  # the template writes messages alone, and most rows have them
            raise BadRow("bad_chat", "text, but most rows are lists of messages")
    # There may be only one answer, or none; `zip` ends with the answers.
    named_answers = dict(zip(("chosen", "rejected"), answers, strict=False))
    return templates.checked_row(prompt, **named_answers)


def _with_prompt(row: Mapping, answer_columns: Sequence[str]) -> Mapping:
    """Return a row of texts with a prompt: its own, or, if it has none, the start that its two transcripts share.

    Raises `BadRow` for a cell that is not text, if the transcripts share no prompt, and if one ends with the human.
    """
    has_prompt = "prompt" in row
    for column in ("prompt", *answer_columns):
        if column != "prompt" or has_prompt:
            templates.check_text(row[column], column)
    if has_prompt:
        return row
    if len(answer_columns) < 2:  # for SFT: one column, whose messages should hold the prompt, too
        raise BadRow("bad_chat", f"{answer_columns[0]!r} is not a list of messages")
    prompt, chosen, rejected = templates.split_transcripts(row["chosen"], row["rejected"])
    answers = {"chosen": chosen, "rejected": rejected}
    for side, text in answers.items():
        ends_with_human = text.rfind(HUMAN) > text.rfind(ASSISTANT)
        if ends_with_human:
            raise BadRow("human_last", f"{side!r} ends with a turn of the human")
    return {**row, "prompt": prompt, **answers}


def _convert_row_for_sft(row: Mapping, template: str | Chat = "paper") -> dict[str, str]:
    """Return `prompt` and `chosen` of a row whose `completion` is the answer, or messages that end with the answer.

    Raises `BadRow` if a label says that the answer is one to avoid (false or 0), so that nobody learns it. Also raises
    it if a label is neither true nor false, because it probably names a class.
    """
    for name in LABELS:
        if name not in row:
            continue
        is_to_learn = TRUTH.get(str(row[name]).strip().lower())
        if is_to_learn is None:
            raise BadRow(
                "bad_label",
                f"{name!r} is {row[name]!r}, not true or false: write these, or rename a column of classes",
            )
        if not is_to_learn:
            raise BadRow("labelled_false", f"{name!r} is false: an answer to avoid")
    return _convert_row(row, template, answer_columns=("completion",))


# Messages


def _write_row(
    row: Mapping, answer_columns: Sequence[str], template: str | Chat
) -> tuple[str, list[str]]:
    """Return the prompt and the answers of a row of messages as texts; a text among them counts as a message.

    `answer_columns` are two, one, or none if there is only a prompt.
    """
    # 1. The messages of the prompt, and of the whole chat with each answer.
    prompt = row.get("prompt")  # rows whose answers are whole chats have none
    prompt_is_text = isinstance(prompt, str)
    prompt_turns: Turns = []
    if prompt_is_text:
        prompt_turns = turns_of_text(prompt)
    elif prompt is not None:
        prompt_turns = messages_of(prompt, "prompt")
    chats = []
    for column in answer_columns:
        chats.append(_whole_chat(prompt_turns, row[column], column, prompt_is_text))
    if not answer_columns:
        chats = [prompt_turns]
    system = row.get("system")
    has_system = isinstance(system, str) and system.strip() != ""
    if has_system and isinstance(template, Chat):  # transcripts have no such role
        chats = [_after_system(system, chat) for chat in chats]

    # 2. Where the answers begin: after what two chats share. A single answer is the last message; without an answer
    #    the whole chat is the prompt.
    if len(answer_columns) == 2:
        start = _count_shared_messages(*chats)
    else:
        start = len(chats[0]) - len(answer_columns)
    answers = []
    if answer_columns:
        answers = [chat[start:] for chat in chats]
    return _write_chat(template, chats[0][:start], answers)


def _after_system(system: str, chat: Turns) -> Turns:
    """Return the chat after a message of the system, unless it begins with one."""
    begins_with_system = bool(chat) and chat[0]["role"] == "system"
    if begins_with_system:
        return chat
    return [{"role": "system", "content": system}, *chat]


def _whole_chat(prompt_turns: Turns, answer, column: str, prompt_is_text: bool) -> Turns:
    """Return the messages of a prompt, followed by those of its answer.

    The answer is a text, or a list of messages. If its messages repeat the prompt, they are the whole chat already.
    Raises `BadRow` if they do not end with the assistant's, or begin with another prompt.
    """
    if isinstance(answer, str):
        templates.check_text(answer, column)
        # Without the one space that separates an answer from `Assistant:`.
        content = re.sub(r"^ (?=\S)", "", answer)
        return [*prompt_turns, {"role": "assistant", "content": content}]
    turns = messages_of(answer, column)
    if not turns or turns[-1]["role"] != "assistant":
        last = f", but of {turns[-1]['role']!r}" if turns else ""
        raise BadRow("bad_chat", f"{column!r} does not end with a message of the assistant{last}")
    repeats_prompt_exactly = turns[: len(prompt_turns)] == prompt_turns
    if repeats_prompt_exactly:
        return turns
    # The messages before the answer may have the text of the prompt, and more beside it, such as the system's message.
    has_question = any(turn["role"] == "user" for turn in turns)
    if prompt_is_text and has_question and _words(prompt_turns) in _words(turns[:-1]):
        return turns
    if turns[0]["role"] in ("system", "user"):
        fault = f"{column!r} begins with a message of the {turns[0]['role']}, but not with 'prompt'"
        raise BadRow(
            "bad_chat", f"{fault}: put all of the prompt into the messages, or leave 'prompt' out"
        )
    return prompt_turns + turns


def _words(turns: Turns) -> str:
    """Return the contents of messages with single spaces between words, to compare them up to white space."""
    contents = " ".join(turn["content"] for turn in turns)
    return " ".join(contents.split())


def write_turns(source: str | Turns, template: str | Chat) -> str:
    """Return messages, or a text as the user's message, as this template writes them for a prompt."""
    turns = turns_of_text(source) if isinstance(source, str) else source
    prompt, _ = _write_chat(template, turns, answers=[])
    return prompt


def _count_shared_messages(chosen: Turns, rejected: Turns) -> int:
    """Return how many messages two chats share before the assistant answers in both.

    Raises `BadRow` if they share none.
    """
    shared = 0
    shorter = min(len(chosen), len(rejected))
    # Stops before the last message, so that each answer has at least one.
    while shared < shorter - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    # Both answers must begin with the assistant's message. If the chats differ in a question first, go back to the
    # assistant's message before that question.
    while shared > 0 and not chosen[shared]["role"] == rejected[shared]["role"] == "assistant":
        shared -= 1
    if shared <= 0:
        fix = "begin both with the same prompt, or name its column by --columns prompt=NAME"
        raise BadRow(
            "no_shared_turn", f"'chosen' and 'rejected' share no message before an answer: {fix}"
        )
    return shared


def _write_chat(
    template: str | Chat, prompt: Turns, answers: Sequence[Turns]
) -> tuple[str, list[str]]:
    """Return a prompt and its answers as the chat template writes them; without a template as a transcript.

    Raises `BadRow` for an empty prompt or answer, and for a prompt that ends with the assistant.
    """
    if not prompt or not prompt[-1]["content"].strip():
        raise BadRow("empty_prompt", "the last message before the answer is empty")
    if prompt[-1]["role"] == "assistant":
        raise BadRow(
            "bad_chat", "the last message before the answer is the assistant's, like the answer"
        )
    for turns in answers:
        # A message may be nothing but a call of a tool.
        if not turns[-1]["content"].strip() and not turns[-1].get("tool_calls"):
            raise BadRow("empty_response", "an answer is empty")
    if isinstance(template, Chat):
        return template.write(prompt, answers)
    return write_transcript(prompt, answers)


# The table


def _shape(name: str, form: Form, **names: str) -> Form:
    """Return a form like `form` for rows in which some columns have other names.

    `names` has them: `prompt="question"` says that what `form` calls prompt is the column question. `name` is what a
    run calls the shape.
    """
    optional = form.optional
    if names.get("prompt") in INSTRUCTIONS:  # Alpaca's may have a column `input` beside it
        optional += ("input",)
    columns = tuple(names.get(column, column) for column in form.columns)
    return replace(form, name=name, columns=columns, names=names, optional=optional)


PAIRS = Form(COLUMNS, _convert_row, name="pairs", optional=("system",))
TRANSCRIPTS = replace(PAIRS, columns=COLUMNS[1:], name="pairs of whole transcripts")
# Answers only for SFT: a later stage with the same file has its prompts.
ANSWERS = replace(
    PAIRS,
    columns=("prompt", "completion"),
    convert=_convert_row_for_sft,
    fractions=WITHOUT_PAIRS,
    optional=("system", *LABELS),
)
MESSAGES = replace(ANSWERS, columns=("completion",))
PROMPTS = replace(
    PAIRS,
    columns=COLUMNS[:1],
    convert=partial(_convert_row, answer_columns=()),
    fractions=(0.0, 0.0, 1.0),
    name="only prompts",
)


def _all_shapes() -> tuple[Form, ...]:
    """Return all shapes, in the order in which `shape_of` tries them: richer rows come before what they contain."""
    shapes = [_shape("LLaMA-Factory's pairs", PAIRS, prompt="conversations"), PAIRS]
    for prompt in PROMPT_NAMES[1:]:
        shapes.append(_shape(f"pairs, with {prompt} as the prompt", PAIRS, prompt=prompt))
    shapes.append(TRANSCRIPTS)
    shapes.append(_shape("messages, for SFT", MESSAGES, completion="messages"))
    shapes.append(_shape("ShareGPT's conversations, for SFT", MESSAGES, completion="conversations"))
    for prompt in PROMPT_NAMES:
        for answer in ANSWER_NAMES:
            name = f"{prompt} and {answer}, for SFT"
            shapes.append(_shape(name, ANSWERS, prompt=prompt, completion=answer))
    shapes.append(PROMPTS)
    return tuple(shapes)


SHAPES = _all_shapes()


def shape_of(columns: Collection[str], user_columns: str = "") -> Form:
    """Return the first shape whose columns are all present and include those that the user names by `--columns`.

    `PAIRS` is returned in three other cases, so that its missing columns are reported:

    1. No shape fits.
    2. A column has the name of a shape's column, but with spaces or invisible marks around it.
    3. Columns are named like two compared answers, and the shape that fits has no pairs: it would ignore which answer
       is better.

    If the user names columns, they are taken as they are, and only the first case counts.
    """
    named_by_user = {new for new, _ in _new_and_old_names(user_columns)}
    known = {column for form in SHAPES for column in form.columns}
    # Such as "prompt " beside chosen and rejected, which would be read as whole transcripts without a prompt.
    almost_known = {_without_space_around(name) for name in columns} - set(columns)
    if almost_known & known and not named_by_user:
        return PAIRS
    shape = PAIRS
    for form in SHAPES:
        has_named_columns = named_by_user <= {*form.columns, *form.optional}
        if has_named_columns and set(form.columns) <= set(columns):
            shape = form
            break
    has_pairs = shape.fractions[1] > 0  # a share of the rows for the reward model
    if name_compared_answers(columns) and not has_pairs and not named_by_user:
        return PAIRS
    return shape


def name_compared_answers(columns: Iterable) -> bool:
    """Return whether columns are named like two answers of which one is better, or like the choice between them."""
    names = [str(name) for name in columns]
    if any(names_a_compared_answer(name) for name in names):
        return True
    # The opposites may stand beside words that name an answer: without such words `good_response` is good.
    cores = set()
    for name in names:
        words = [word.lower() for word in re.findall(r"[A-Za-z]+", name)]
        cores.add("_".join(word for word in words if not _NAMES_AN_ANSWER.fullmatch(word)))
    return any({better, worse} <= cores for better, worse in OPPOSITES)


def names_a_compared_answer(column: str) -> bool:
    """Return whether a column is named like one of two answers, or like the choice between them.

    `better_response` and `response_a` are; `preferred_language` and `chosen_model` are not, because a word such as
    preferred counts only beside words that name an answer.
    """
    if _ONE_OF_SEVERAL_ANSWERS.search(column):  # response_a, answer2, output_good
        return True
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", column)  # isChosen and is_chosen are two words
    says_which_is_better = False
    for word in words:
        if _SAYS_WHICH_IS_BETTER.fullmatch(word):
            says_which_is_better = True
        elif not _NAMES_AN_ANSWER.fullmatch(word):
            return False
    return says_which_is_better


def _new_and_old_names(columns: str) -> list[list[str]]:
    """Return the new and the old name of each column in `--columns`, which has new=old,new=old."""
    pairs = []
    for item in columns.split(","):
        if item.strip():
            new, _, old = item.partition("=")
            pairs.append([new.strip(), old.strip()])
    return pairs


def rename(rows, columns: str):
    """Return rows, or a data set, whose columns are renamed as `--columns` says, such as `prompt=question,chosen=good`.

    In this example the column question becomes prompt. A column that was called prompt before is left out, because the
    user says that another one is meant. Raises `InputError` if a name occurs twice, if a new name is none of `TARGETS`,
    and if no column has the old name.
    """
    present = columns_of(rows)
    new_name_of: dict[str, str] = {}  # old name -> new name
    old_name_of: dict[str, str] = {}  # new name -> old name
    for new, asked in _new_and_old_names(columns):
        old = _present_name(asked, present)
        if old in new_name_of or new in old_name_of:
            raise InputError(f"--columns {columns}: a name occurs twice: give each column one name")
        new_name_of[old] = new
        old_name_of[new] = old
    for new, old in old_name_of.items():
        if new not in TARGETS or not old:
            raise InputError(
                f"--columns {new}={old}: give NEW=OLD with NEW one of {', '.join(TARGETS)}"
            )
        if old not in present:
            fix = f"{did_you_mean(old, present)}there are {shown_names(present)}"
            raise InputError(f"--columns {new}={old}: there is no column {old}: {fix}")
    # With `prompt=question`, the column that was called prompt is left out, unless it gets a new name itself.
    replaced = [name for name in present if name in old_name_of and name not in new_name_of]
    if not isinstance(rows, list):  # a data set of `datasets`
        return rows.remove_columns(replaced).rename_columns(new_name_of)
    renamed = []
    for row in rows:
        kept = [name for name in row if name not in replaced]
        renamed.append({new_name_of.get(name, name): row[name] for name in kept})
    return renamed


def _present_name(asked: str, present: Collection[str]) -> str:
    """Return the name that the rows have for the column that the user calls `asked`: it may have spaces around it.

    If there is no such column, or more than one, `asked` itself is returned.
    """
    if asked in present:
        return asked
    with_spaces = [name for name in present if isinstance(name, str) and name.strip() == asked]
    return with_spaces[0] if len(with_spaces) == 1 else asked


# Rows to the columns of a task


def to_preferences(
    rows: Iterable[dict],
    source: str,
    bad_rows: str = "error",
    form: Form | None = None,
    place_of: Callable[[int], str] = "row {}".format,
) -> tuple[list[dict], Counter]:
    """Convert rows to `(rows of a task, counts)`.

    Without `form`, the rows' columns choose the shape (see `SHAPES`). Pairs become `{"prompt", "chosen", "rejected"}`
    dicts of strings, answers for SFT `{"prompt", "chosen"}`, only prompts `{"prompt"}`. White space at the end of a
    response is stripped, since the end-of-sequence token follows it; the rest stays unchanged.

    Rows with a fault that `DROPPED` names are dropped and counted by reason. Any other bad row raises `InputError` that
    names `source` and the row; with `bad_rows="drop"` it is dropped and counted, too, by reasons such as
    `missing_column`, `not_text`, `bad_chat`, `no_shared_turn` and `empty_prompt`. `counts` also has `read` and `kept`.

    `InputError` is raised in any case if all rows lack a column or have lists written as text in it, if answers repeat
    their prompts, and if no row is left. `place_of` returns the place of a row from its number, for rows of several
    files.
    """
    form = form or shape_of(columns_of(rows))
    _check_columns(rows, source, form)
    # A list that was written as text ("[{'role': ...") would be read as an answer. Two kinds of data are not searched
    # for such cells: the paper's own, whose prompts have a fixed form, have them rightly; those of `datasets` (no
    # `list`) have types, and may be too many to look at.
    if not form.has_fixed_prompts and isinstance(rows, list):
        refuse_written_lists(rows, form.columns, source)
    kept = []
    counts = Counter(read=0)
    for number, row in enumerate(rows, start=1):
        counts["read"] += 1
        try:
            _check_cells_are_there(row, form)
            converted = form.convert(_by_names_of_the_task(row, form))
            kept.append(converted | _columns_for_functions(row, form))
        except BadRow as bad:
            counts[bad.reason] += 1
            is_always_dropped = bad.reason in DROPPED
            if bad_rows == "error" and not is_always_dropped:
                text = _with_names_of_the_rows(str(bad), form)
                fix = "correct or delete the row, or drop such rows with --bad_rows drop"
                raise InputError(f"{source}: {place_of(number)}: {text}: {fix}") from None
    if not kept:
        reasons = [f"{reason} {n}" for reason, n in counts.items() if reason != "read"]
        dropped = ", ".join(reasons) if reasons else "no rows"
        raise InputError(f"{source}: no row can be used ({dropped}): give at least one whole row")
    _check_answers_are_without_prompt(kept, source)
    counts["kept"] = len(kept)
    return kept, counts


def _with_names_of_the_rows(message: str, form: Form) -> str:
    """Return a message in which each quoted name of a task's column is the name that the user's rows have for it."""

    def name_in_the_rows(quoted: re.Match) -> str:
        return repr(form.names.get(quoted[1], quoted[1]))

    return re.sub(r"'(\w+)'", name_in_the_rows, message)


def _check_cells_are_there(row: Mapping, form: Form) -> None:
    """Raise `BadRow` if a row lacks a column of its form, or one that a function of the user needs."""
    for column in form.columns:
        if column not in row:
            raise BadRow("missing_column", f"no {column!r}")
    for column in form.needed_by_functions:
        if row.get(column) is None:  # the function would get None here, and a text for other rows
            raise BadRow("missing_column", f"no {column!r}")


def _by_names_of_the_task(row: Mapping, form: Form) -> Mapping:
    """Return the columns that the form reads, by the names of the task.

    If the prompt is an instruction and the row has an `input` for it, the input goes on a line below the instruction.
    """
    read = (*form.columns, *form.optional)
    named = {name: row[name] for name in read if name in row}
    for name_of_task, name_in_row in form.names.items():
        named[name_of_task] = row[name_in_row]
    if form.names.get("prompt") in INSTRUCTIONS:
        texts = [named.get("prompt"), named.get("input")]
        if all(isinstance(text, str) and text.strip() for text in texts):
            named["prompt"] = "\n".join(texts)
    return named


def _columns_for_functions(row: Mapping, form: Form) -> dict[str, str]:
    """Return the column `row` of a task, which goes along with the prompt: what the user's functions take, as JSON.

    A value that JSON lacks, such as a date, becomes text. Empty if no function takes columns.
    """
    if not form.columns_for_functions:
        return {}
    columns = {name: row.get(name) for name in form.columns_for_functions}
    return {ROW: json.dumps(columns, default=str)}


def _check_columns(rows: Iterable[dict], source: str, form: Form) -> None:
    """Raise `InputError` if a column is missing in all rows; its fix depends on the names that are there."""
    present = columns_of(rows)
    if not rows or set(form.columns) <= set(present):  # no rows at all: `to_preferences` says so
        return
    # a damaged file's names may have line breaks
    names = " ".join(shown_names(present).split()) or "none"
    expected = ", ".join(form.columns)
    is_no_known_shape = form.columns == COLUMNS  # `shape_of` returns pairs if no shape fits
    if is_no_known_shape:
        expected += " (or chosen, rejected with whole transcripts; or prompt and completion, or messages, for SFT)"
    fix = _fix_of_columns(rows, present, is_no_known_shape)
    raise InputError(f"{source}: columns found: {names}; expected: {expected}: {fix}")


def _fix_of_columns(rows: Iterable[dict], present: Sequence, is_no_known_shape: bool) -> str:
    """Return what to do about rows in which no column has an expected name, from the names that are `present`."""
    # 1. The names are there, but not as they should be.
    renamed = {name: _without_space_around(name) for name in present if _has_space_around(name)}
    # `str.strip` takes white space off, and leaves marks such as a byte order mark.
    if any(name.strip() != stripped for name, stripped in renamed.items()):
        return f"names have invisible marks around them: in pandas rows.rename(columns={renamed})"
    if renamed:
        return (
            "names have spaces around them: strip them in pandas by rows.rename(columns=str.strip)"
        )
    inside = _column_with_rows_inside(rows, present)
    if inside:
        return f"the rows are inside {inside!r}: write its objects as the rows"
    # A table whose columns are separated by colons or spaces is read as one column.
    names = " ".join(map(str, present))
    known_words = {*re.findall(r"\w+", names)} & {*COLUMNS, *PROMPT_NAMES, *ANSWER_NAMES}
    if len(present) == 1 and len(known_words) > 1:
        return "separate the columns by commas, semicolons, tabs or |"

    # 2. The first line has no names, or the columns have other names.
    if any(len(str(name).split()) > MOST_WORDS_OF_A_NAME for name in present):
        return "if the first line is a row, write a line with the names of the columns above it"
    if not is_no_known_shape:
        return "rename or add the missing columns"
    has_other_names = not re.search("(?i)chosen|reject", names)
    if has_other_names and name_compared_answers(present):
        return "write the better answer of each row into chosen, and the other into rejected"
    return (
        "rename or add the missing columns, or name yours, "
        "as by --columns prompt=NAME,chosen=NAME,rejected=NAME (SFT: completion=NAME)"
    )


def _column_with_rows_inside(rows: Iterable[dict], columns: Iterable) -> str:
    """Return the name of a column whose cells have a prompt or answers inside, as in `{"row": {"prompt": ...}}`.

    Empty if there is no such column. Only the first row is looked at.
    """
    for row in islice(rows, 1):
        for name in columns:
            cell = row.get(name)
            if isinstance(cell, dict) and {*COLUMNS, *PROMPT_NAMES, "messages"} & cell.keys():
                return str(name)
    return ""


def shown_names(columns: Iterable) -> str:
    """Return the names of columns in one line; those with spaces around them are in quotes, which show the spaces."""
    shown = []
    for name in columns:
        if _has_space_around(name):
            shown.append(repr(name))
        else:
            shown.append(str(name))
    return ", ".join(shown)


def _has_space_around(name) -> bool:
    return name != _without_space_around(name)


def _without_space_around(name):
    """Return a column's name without spaces, byte order marks and spaces of no width around it."""
    return name.strip("\ufeff\u200b").strip() if isinstance(name, str) else name


def _check_answers_are_without_prompt(rows: Sequence[Mapping], source: str) -> None:
    """Raise `InputError` if the answers of most rows begin with their prompt: they are whole transcripts."""
    answered = [row for row in rows if "chosen" in row]
    repeats = 0
    for row in answered:
        answers = [row[side] for side in ("chosen", "rejected") if side in row]
        repeats += repeats_prompt(row["prompt"], *answers)
    if 2 * repeats > len(answered):
        fix = "cut the prompts off the answers, or leave the column prompt out if both are whole transcripts"
        raise InputError(
            f"{source}: in {repeats} of {len(answered)} rows answers begin with their prompt: {fix}"
        )


def repeats_prompt(prompt: str, *answers: str) -> bool:
    """Return whether an answer begins with the prompt, or like a transcript."""
    starts = (prompt.strip(), HUMAN.strip())
    return any(answer.lstrip().startswith(starts) for answer in answers)


def columns_of(rows: Iterable[dict]) -> list[str]:
    """Return the columns that any of the rows has, in order; of a stream, those of its first row.

    A data set of `datasets` knows its columns. In a list each row may have others, so all are looked at.
    """
    known_columns = getattr(rows, "column_names", None)
    if known_columns is not None:
        return known_columns
    looked_at = rows if isinstance(rows, list) else islice(rows, 1)
    columns: dict[str, None] = {}  # each once
    for row in looked_at:
        columns.update(dict.fromkeys(row))
    return list(columns)
