//! States as bytes: a conversation that goes on elsewhere.

use qhx_base::ErrorKind;
use qhx_core::engine::{Model, Prompt, Request};
use qhx_tests::replay::{generate, play};
use qhx_tests::tiny::{self, CPU, Chat, Goldens};
use qhx_tests::{backends, says};
use qhx_tiers::tier;
use sha2::{Digest as _, Sha256};

fn open(tiny: &str) -> (Model, Goldens) {
    let checkpoint = tiny::fixture(tiny);
    let model = tiny::open(&tiny::bundle(&checkpoint, CPU), backends::cpu()).unwrap();
    (model, tiny::goldens(&checkpoint))
}

/// Plays a conversation whose every turn goes on in another session, from the bytes of the turn before. Each says and
/// reuses what it does where the conversation stays.
fn moves(model: &mut Model, elsewhere: &mut dyn FnMut() -> Model, chat: &Chat) {
    let stayed = play(model, chat);
    let mut now = elsewhere();
    for (index, (turn, expected)) in chat.turns.iter().zip(stayed).enumerate() {
        let request = Request::greedy(chat.prompt(index), turn.output_ids.len());
        let found = generate(&mut now, &request);
        assert_eq!(found.tokens, turn.output_ids, "{}, turn {index}", chat.id);
        assert_eq!(found.reused_tokens, expected.reused_tokens, "{}, turn {index}", chat.id);
        let state = now.export_state().unwrap();
        let position = now.op_mut().position();
        now = elsewhere();
        now.import_state(&state).unwrap();
        assert_eq!(now.op_mut().position(), position, "{}, turn {index}", chat.id);
    }
}

/// Caches, recurrent states with their snapshots, rings.
#[test]
fn a_conversation_goes_on_from_its_bytes_in_every_kind_of_state() {
    for tiny in ["mistral-tiny", "qwen35-tied", "gemma4-tiny"] {
        let (mut model, goldens) = open(tiny);
        let sessions = model.sessions();
        for chat in &goldens.chat {
            moves(&mut model, &mut || sessions.open().unwrap(), chat);
        }
    }
}

#[tier(qnn)]
fn a_state_of_the_npu_goes_on_in_another_session() {
    let checkpoint = tiny::fixture("mistral-tiny");
    let manifest = tiny::bundle(&checkpoint, tiny::Variant { target: Some("v81"), ..CPU });
    let mut model = tiny::open(&manifest, backends::qnn()).unwrap();
    let goldens = tiny::goldens(&checkpoint);
    let case = qhx_tests::replay::shortest(&goldens, 1)[0];
    let (first, second) = case.output_ids.split_at(2);
    let prompt = |ids: &[u32]| Prompt::Tokens(ids.to_vec());
    let begun = generate(&mut model, &Request::greedy(prompt(&case.prompt_ids), first.len()));
    assert_eq!(begun.tokens, first);
    let mut other = model.new_session().unwrap();
    other.import_state(&model.export_state().unwrap()).unwrap();
    let ids = [&case.prompt_ids, first].concat();
    let count = second.len().min(3);
    let found = generate(&mut other, &Request::greedy(prompt(&ids), count));
    assert_eq!(found.tokens, second[..count]);
    assert_eq!(found.reused_tokens, ids.len() - 1);
}

/// `state` with something else in it, and the hash that fits.
fn forged(state: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = state[..state.len() - 32].to_vec();
    change(&mut bytes);
    let hash = Sha256::digest(&bytes);
    [&bytes[..], &hash].concat()
}

/// `state` with another description.
fn described(state: &[u8], from: &str, to: &str) -> Vec<u8> {
    forged(state, |bytes| {
        let length = u64::from_le_bytes(*bytes[12..].first_chunk().unwrap()) as usize;
        let text = String::from_utf8(bytes[20..20 + length].to_vec()).unwrap();
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text, "{from}");
        bytes[12..20].copy_from_slice(&(changed.len() as u64).to_le_bytes());
        drop(bytes.splice(20..20 + length, changed.into_bytes()));
    })
}

#[test]
fn bytes_that_are_no_state_change_nothing() {
    let (mut model, goldens) = open("mistral-tiny");
    let chat = &goldens.chat[0];
    let (first, second) = (&chat.turns[0], &chat.turns[1]);
    let prompt = |ids: &[u32]| Prompt::Tokens(ids.to_vec());
    let ask = |model: &mut Model, ids: &[u32], count| {
        generate(model, &Request::greedy(prompt(ids), count))
    };
    ask(&mut model, &first.prompt_ids, first.output_ids.len());
    let state = model.export_state().unwrap();
    let (mut another, _) = open("llama3-tiny");
    let of_another = another.export_state().unwrap();
    let with = |at: usize, byte: u8| forged(&state, |bytes| bytes[at] = byte);
    let mut flipped = state.clone();
    flipped[state.len() / 2] ^= 1;
    let positions = format!("\"position\":{},", model.op_mut().position());
    let bad = [
        ("cut short", Vec::new()),
        ("cut short", state[..15].to_vec()),
        ("cut short", state[..state.len() - 1].to_vec()),
        ("damaged", flipped),
        ("it is none", with(0, b'x')),
        ("it is of version 2, expected 1", with(8, 2)),
        ("cut short", with(17, 255)),
        ("of another bundle", of_another.clone()),
        ("its description", described(&state, "{", "[")),
        ("of host-op \"another\"", described(&state, "\"op\":\"", "\"op\":\"another\",\"was\":\"")),
        ("its states", described(&state, &positions, "\"position\":1,")),
        ("its states", described(&state, &positions, "\"position\":99999999999,")),
        ("does not lie behind", {
            let span = "{\"start\":9,\"positions\":18446744073709551615,\"key\":{\"id\":[";
            let key = vec!["0"; 32].join(",");
            let spans = format!("\"spans\":[{span}{key}],\"frames\":null,\"part\":null}}}}]");
            described(&state, "\"spans\":[]", &spans)
        }),
        ("cut short", described(&state, "\"bytes\":", "\"bytes\":9")),
        // The op's own part.
        (
            "state 1 of 1",
            forged(&state, |bytes| {
                let end = bytes.len();
                bytes[end - 64..].fill(0xff);
            }),
        ),
    ];
    for (expected, bytes) in bad {
        let op_fails = expected.starts_with("state");
        let error = model.import_state(&bytes).unwrap_err();
        let kind = if op_fails { ErrorKind::Prompt } else { ErrorKind::Usage };
        says(&error, kind, &[expected]);
        let again = ask(&mut model, &second.prompt_ids, second.output_ids.len());
        assert_eq!(again.tokens, second.output_ids, "{expected}");
        assert_eq!(again.reused_tokens > 0, !op_fails, "{expected}");
    }
    another.import_state(&of_another).unwrap();
}
