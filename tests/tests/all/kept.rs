//! Conversations that take turns: what was consumed of each is not consumed again.

use qhx_core::engine::{Generation, Model, Prompt, Request};
use qhx_tests::backends;
use qhx_tests::replay::{generate, play};
use qhx_tests::tiny::{self, CPU, Chat, Goldens};

/// More than the states of all conversations of a tiny model take.
const PLENTY: usize = 64 << 20;

fn open(tiny: &str, bytes: usize) -> (Model, Goldens) {
    let checkpoint = tiny::fixture(tiny);
    let manifest = tiny::bundle(&checkpoint, CPU);
    let model = tiny::open_keeping(&manifest, backends::cpu(), bytes).unwrap();
    (model, tiny::goldens(&checkpoint))
}

/// Asks turn `index` of a conversation, whose earlier turns are the golden ones.
fn ask(model: &mut Model, chat: &Chat, index: usize) -> Generation {
    let turn = &chat.turns[index];
    let request = Request::greedy(chat.prompt(index), turn.output_ids.len());
    let generation = generate(model, &request);
    assert_eq!(generation.tokens, turn.output_ids, "{}, turn {index}", chat.id);
    generation
}

/// Positions that a state must save to be kept.
const WORTH: usize = 32;

/// Plays all conversations, one turn of each after the other, in the session that `session` says. Each turn must
/// consume hardly more than where its conversation is alone.
fn take_turns(goldens: &Goldens, alone: &mut Model, sessions: &mut [Model], keep: bool) {
    let reused =
        |chat| -> Vec<_> { play(alone, chat).iter().map(|turn| turn.reused_tokens).collect() };
    let reused: Vec<Vec<_>> = goldens.chat.iter().map(reused).collect();
    let most = goldens.chat.iter().map(|chat| chat.turns.len()).max().unwrap();
    for index in 0..most {
        for (number, chat) in goldens.chat.iter().enumerate() {
            if index >= chat.turns.len() {
                continue;
            }
            let count = sessions.len();
            let session = &mut sessions[(number + index) % count];
            let found = ask(session, chat, index).reused_tokens;
            let expected = reused[number][index];
            let enough = found + WORTH > expected;
            assert!(enough, "{}, turn {index}: {found}, expected {expected}", chat.id);
            if keep {
                session.keep_state().unwrap();
            }
        }
    }
}

/// Caches, recurrent states, rings.
const KINDS: [&str; 3] = ["mistral-tiny", "qwen35-tied", "gemma4-tiny"];

#[test]
fn conversations_that_take_turns_consume_only_what_is_new() {
    for tiny in KINDS {
        let (mut alone, goldens) = open(tiny, 0);
        let (model, _) = open(tiny, PLENTY);
        take_turns(&goldens, &mut alone, &mut [model], false);
        assert_eq!(alone.kept_states().states, 0, "none are kept unasked");
    }
}

#[test]
fn a_conversation_goes_on_in_whichever_session_it_comes_to() {
    for tiny in KINDS {
        let (mut alone, goldens) = open(tiny, 0);
        let (model, _) = open(tiny, PLENTY);
        let other = model.new_session().unwrap();
        take_turns(&goldens, &mut alone, &mut [model, other], true);
    }
}

/// The second conversation that begins as an earlier one leaves a state where they depart.
#[test]
fn what_conversations_begin_with_is_consumed_twice_at_most() {
    for tiny in ["mistral-tiny", "qwen35-tied"] {
        let (mut model, goldens) = open(tiny, PLENTY);
        let (mut cold, _) = open(tiny, 0);
        let begin = &goldens.chat.iter().find(|chat| chat.turns.len() > 2).unwrap().turns[2];
        let begin = &begin.prompt_ids;
        for end in 0..3_u32 {
            let ids: Vec<_> = begin.iter().copied().chain([100 + end, 110, 120]).collect();
            let request = Request::greedy(Prompt::Tokens(ids), 4);
            let found = generate(&mut model, &request);
            cold.reset().unwrap();
            assert_eq!(found.tokens, generate(&mut cold, &request).tokens, "{tiny}");
            let truncates = model.info().can_truncate;
            let reused = if end > u32::from(!truncates) { begin.len() } else { 0 };
            assert_eq!(found.reused_tokens, reused, "{tiny}, conversation {end}");
        }
    }
}

#[test]
fn states_stay_within_their_budget_and_the_answers_right() {
    let (mut model, goldens) = open("qwen35-tied", PLENTY);
    ask(&mut model, &goldens.chat[1], 1);
    model.keep_state().unwrap();
    let counts = model.kept_states();
    let one = counts.bytes / counts.states;
    let budget = one * 2;
    let (mut model, _) = open("qwen35-tied", budget);
    let (mut alone, _) = open("qwen35-tied", 0);
    let mut most = 0;
    for index in 0..2 {
        for chat in &goldens.chat {
            ask(&mut model, chat, index);
            let kept = model.kept_states();
            assert!(kept.bytes <= budget, "{kept:?}");
            most = most.max(kept.states);
        }
    }
    assert!(most > 0);
    model.forget_kept_states();
    assert_eq!(model.kept_states().bytes, 0);
    model.reset().unwrap();
    alone.reset().unwrap();
    let found = [&mut model, &mut alone].map(|model| ask(model, &goldens.chat[0], 1).reused_tokens);
    assert_eq!(found[0], found[1], "as if nothing had been kept");
}
