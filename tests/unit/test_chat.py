from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.commands.chat import Conversation, Session, run
from outrider.config import SamplingParams
from outrider.errors import CapacityError, PromptError
from tests.fake_llm import FakeLLM


def encode(messages):
    """A token per character and two per message."""
    return [0] * sum(2 + len(message["content"]) for message in messages)


def lines(*given):
    """A reader of these lines; an exception class is raised in its place, EOFError at the end."""
    queue = [*given, EOFError]

    def read():
        line = queue.pop(0)
        if isinstance(line, type):
            raise line
        return line

    return read


def session(llm, **params):
    return Session(llm, SamplingParams(**params), Conversation())


def test_the_conversation_is_kept_and_sent_with_each_question():
    llm = FakeLLM(answers=["One.", "Two."])

    assert 0 == run(session(llm), lines("a", "b"))
    assert [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "b"},
    ] == llm.tokenizer.chats[-1]


def test_ctrl_c_stops_the_answer_keeps_it_and_the_chat_goes_on(capsys):
    llm = FakeLLM(answers=["Hello there.", "Two."])

    def press(index):
        if len(llm.prompts) == 1 and index == 4:
            os.kill(os.getpid(), signal.SIGINT)

    llm.before_chunk = press
    chat = session(llm)

    assert 0 == run(chat, lines("a", "b"))
    assert [("a", "Hello"), ("b", "Two.")] == chat.conversation.turns
    assert "Hello\nTwo.\n" == capsys.readouterr().out
    assert 2 == llm.num_closed


def test_ctrl_c_at_the_prompt_does_not_leave(capsys):
    llm = FakeLLM()

    assert 0 == run(session(llm), lines(KeyboardInterrupt, "a"))
    assert "Hello there.\n" == capsys.readouterr().out


def test_a_second_ctrl_c_leaves_at_once():
    llm = FakeLLM()
    llm.before_chunk = lambda _: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]

    with pytest.raises(KeyboardInterrupt):
        run(session(llm), lines("a"))

    assert 1 == llm.num_closed


def test_clear_forgets_and_exit_leaves():
    llm = FakeLLM()
    chat = session(llm)

    assert 0 == run(chat, lines("a", "/clear", "b", "/exit", "never"))
    assert [1, 1] == [len(messages) for messages in llm.tokenizer.chats]
    assert ["b"] == [question for question, _ in chat.conversation.turns]


def test_stats_help_and_unknown_commands_answer_on_stderr(capsys):
    llm = FakeLLM()

    assert 0 == run(session(llm), lines("a", "/stats", "/help", "/nonsense"))
    captured = capsys.readouterr()
    assert "Hello there.\n" == captured.out
    assert "1 answers, 12 tokens; acceptance length 2.00 over 5 verify steps" in captured.err
    assert "Ctrl-D leaves" in captured.err
    assert "/nonsense is not a command" in captured.err
    assert 1 == len(llm.prompts)


def test_rate_and_acceptance_length_follow_each_answer(capsys):
    run(session(FakeLLM()), lines("a"))

    line = capsys.readouterr().err
    assert "then 100.0 tokens/s" in line
    assert "acceptance length 2.00 (ngram)" in line


def test_a_conversation_that_outgrows_the_context_forgets_its_oldest_turns(capsys):
    llm = FakeLLM(max_model_len=60)
    chat = session(llm, max_tokens=12)

    assert 0 == run(chat, lines("first", "second", "third"))
    assert 2 == len(chat.conversation.turns)
    assert all(len(ids) + 12 <= 60 for ids in llm.prompts)
    assert "the oldest 1 of 2 turns were forgotten" in capsys.readouterr().err


def test_a_message_longer_than_the_context_is_refused_and_the_chat_goes_on(capsys):
    llm = FakeLLM(max_model_len=60)

    assert 0 == run(session(llm), lines("x" * 100, "short"))
    captured = capsys.readouterr()
    assert "this message takes 102 tokens; allowed: 59" in captured.err
    assert "Hello there.\n" == captured.out


texts = st.text(max_size=20)


@given(st.lists(st.tuples(texts, texts), max_size=6), texts, st.integers(2, 120), st.data())
def test_what_fits_is_the_longest_run_of_latest_turns(turns, question, context_len, data):
    """Room for the answer is kept as long as there are turns to drop, and no turn goes in vain."""
    answer_len = data.draw(st.integers(1, context_len))
    conversation = Conversation("be brief", list(turns))
    try:
        ids = conversation.fit(question, encode, context_len, answer_len)
    except CapacityError:
        assert len(encode(Conversation("be brief").messages(question))) >= context_len
        return

    kept = conversation.turns
    assert turns[len(turns) - len(kept) :] == kept
    assert len(ids) < context_len
    assert len(ids) + answer_len <= context_len or not kept
    if len(kept) < len(turns):
        longer = Conversation("be brief", turns[len(turns) - len(kept) - 1 :])
        assert len(encode(longer.messages(question))) + answer_len > context_len


def test_a_line_that_is_not_text_is_reported_and_the_chat_goes_on(capsys):
    answered = []
    lines = iter([PromptError("this line of stdin is not UTF-8"), "hello"])

    def read_line() -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        if isinstance(line, Exception):
            raise line
        return line

    session = SimpleNamespace(answer=answered.append, command=lambda line: True)

    assert 0 == run(session, read_line)
    assert ["hello"] == answered
    assert "not UTF-8" in capsys.readouterr().err
