"""Who may use a model when: streams, threads, Ctrl-C, closing."""

import gc
import os
import signal
import subprocess
import sys
import threading

import pytest
from conftest import case

import qhx

FRANCE = case("llama3-tiny", "france")
# As long as the answer that is compared.
AS_LONG = {"max_new_tokens": len(FRANCE["output_ids"])}
# Until the context is full.
LONG = {"max_new_tokens": 10_000, "ignore_eos": True}


def until_busy(model):
    """Waits until another thread is in the model: it could not while that held the interpreter's lock."""
    while not model.busy:
        os.sched_yield()


def aside(work, *arguments):
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread


def test_an_open_stream_refuses_all_else(model):
    with model.generate(FRANCE["prompt"], stream=True, **AS_LONG) as stream:
        first = next(stream)
        for use in (
            lambda: model.generate("Hi"),
            lambda: model.generate("Hi", stream=True),
            lambda: model.embed(["Hi"]),
        ):
            with pytest.raises(qhx.BusyError, match="a stream of this model is open") as raised:
                use()
            assert raised.value.kind == "busy" and "close" in raised.value.hint
        assert stream.result is None and model.busy
        assert first + "".join(stream) == FRANCE["text"]
    assert not model.busy


def test_a_stream_ends_where_it_is_closed_or_dropped(model):
    stream = model.generate(FRANCE["prompt"], stream=True, **AS_LONG)
    pieces = [next(stream), next(stream)]
    stream.close()
    assert stream.result.finish_reason == "cancelled" and stream.result.text == "".join(pieces)
    assert len(stream.result.tokens) == 2, "nothing runs between two pieces"
    assert list(stream) == [] and stream.close() is None
    for _ in model.generate(FRANCE["prompt"], stream=True, **AS_LONG):
        break
    gc.collect()
    assert model.generate(FRANCE["prompt"], **AS_LONG).text == FRANCE["text"]
    stream = model.generate(FRANCE["prompt"], stream=True, **AS_LONG)
    assert model.cancel() and list(stream) == [] and stream.result.finish_reason == "cancelled"
    assert not model.cancel()


def test_threads_wait_for_their_turn(model):
    texts = []
    work = [aside(lambda: texts.append(model.generate(FRANCE["prompt"], **AS_LONG).text)) for _ in range(4)]
    for thread in work:
        thread.join()
    assert texts == [FRANCE["text"]] * 4


def test_work_is_cancelled_from_another_thread(model):
    cancelling = aside(lambda: (until_busy(model), model.cancel()))
    answer = model.generate(FRANCE["prompt"], **LONG)
    cancelling.join()
    assert answer.finish_reason == "cancelled"
    assert model.generate(FRANCE["prompt"], **AS_LONG).text == FRANCE["text"]


@pytest.fixture
def interruptible():
    """As in a terminal: jobs in the background of a shell ignore the signal, and Python leaves that as it is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_generation(model):
    whole = model.generate(FRANCE["prompt"], **LONG)
    model.generate("Hi", max_new_tokens=1)
    interrupting = aside(lambda: (until_busy(model), os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        model.generate(FRANCE["prompt"], **LONG)
    interrupting.join()
    assert not model.busy
    # Less of the same text was consumed than there would have been.
    again = model.generate(FRANCE["prompt_ids"] + whole.tokens[:-2], max_new_tokens=1)
    assert again.reused_tokens < again.prompt_tokens - 1


def test_a_signal_handler_cannot_use_a_model_that_works(model):
    raised = []

    def handler(*_):
        try:
            model.generate("Hi")
        except qhx.BusyError as error:
            raised.append(error)
        model.cancel()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        sending = aside(lambda: (until_busy(model), os.kill(os.getpid(), signal.SIGUSR1)))
        answer = model.generate(FRANCE["prompt"], **LONG)
        sending.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert answer.finish_reason == "cancelled" and "signal handler" in raised[0].message


def test_a_closed_model_does_nothing_more(language):
    with qhx.Model(language) as model:
        closing = aside(lambda: (until_busy(model), model.close()))
        answer = model.generate(FRANCE["prompt"], **LONG)
        closing.join()
        assert answer.finish_reason == "cancelled"
    for use in (lambda: model.generate("Hi"), lambda: model.generate("Hi", stream=True)):
        with pytest.raises(qhx.UsageError, match="the model is closed"):
            use()
    model.close()


def test_closing_a_model_ends_its_stream(language):
    model = qhx.Model(language)
    stream = model.generate(FRANCE["prompt"], stream=True, **AS_LONG)
    next(stream)
    model.close()
    assert list(stream) == [] and stream.result.finish_reason == "cancelled"


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_process_is_told_to_open_its_own(model, busy):
    stream = model.generate("Hi", stream=True) if busy else None
    calls = [lambda: model.generate("Hi"), lambda: model.busy, model.cancel, model.close]
    if stream:
        calls += [lambda: next(stream), lambda: stream.result, stream.close]
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls:
            try:
                call()
            except qhx.UsageError as error:
                refused += "forked" in error.message
        # What is dropped there waits for nobody.
        del stream, calls, call
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    assert model.busy == busy
    if stream:
        stream.close()


def test_nothing_is_printed_and_no_interpreter_is_started(language):
    """With a chat template, whose helper would be the program that is running."""
    program = (
        "import os, sys, qhx\n"
        "model = qhx.Model(sys.argv[1])\n"
        "model.chat([{'role': 'user', 'content': 'Hi'}], max_new_tokens=2)\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "stream = model.generate('Hi', stream=True)\n"
        "next(stream)\n"
        "sys.exit(children)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, language], capture_output=True, text=True, check=False)
    # With a stream open at its end, too.
    assert (run.returncode, run.stdout, run.stderr.strip()) in [(0, "", ""), (1, "", "")], run
