//! Calls of the QNN library that fail under a good bundle, and a DSP that restarts.

use std::path::PathBuf;
use std::sync::Arc;

use qhx_base::{CancelToken, ErrorKind, Result};
use qhx_core::engine::{Model, Prompt, Request};
use qhx_fake_device::{Plan, Rule, Then};
use qhx_tests::faults::{Faults, explains};
use qhx_tests::replay::try_generate;
use qhx_tests::says;
use qhx_tests::tiny::{self, CPU, Goldens, Variant};
use qhx_tiers::tier;

const TINY: &str = "qwen35-tied";

/// The bundle that the other tests damage.
fn bundle() -> PathBuf {
    tiny::bundle(&tiny::fixture(TINY), Variant { target: Some("v81"), ..CPU })
}

/// The first `tokens` of the answer to the shortest prompt, from the beginning.
fn generate(model: &mut Model, goldens: &Goldens, tokens: usize) -> Result<Vec<u32>> {
    let case = goldens.cases.iter().filter(|case| case.output_ids.len() >= tokens);
    let case = case.min_by_key(|case| case.prompt_ids.len()).unwrap();
    model.reset()?;
    let request = Request::greedy(Prompt::Text(case.prompt.clone()), tokens);
    let generation = try_generate(model, &request)?;
    assert_eq!(generation.tokens, case.output_ids[..tokens], "{}", case.id);
    Ok(generation.tokens)
}

/// Two turns, each with the first `tokens` of an answer at most. Where `after` is 1, only the second one.
fn chat(model: &mut Model, goldens: &Goldens, tokens: usize, after: usize) -> Result<Vec<u32>> {
    let chat = goldens.chat.iter().filter(|chat| chat.turns.len() > 1);
    let chat = chat.min_by_key(|chat| chat.turns[1].prompt_ids.len()).unwrap();
    let mut said = Vec::new();
    for (index, turn) in chat.turns.iter().enumerate().take(2).skip(after) {
        let tokens = tokens.min(turn.output_ids.len());
        let generation = try_generate(model, &Request::greedy(chat.prompt(index), tokens))?;
        assert_eq!(generation.tokens, turn.output_ids[..tokens], "{}", chat.id);
        said.extend(generation.tokens);
    }
    Ok(said)
}

#[tier(qnn)]
fn htp_a_call_that_fails_is_one_error_and_the_model_goes_on() {
    let faults = Faults::open();
    let goldens = tiny::goldens(&tiny::fixture(TINY));
    faults.walk("generate", None, &bundle(), |model| generate(model, &goldens, 3));
    // The emulator takes half a minute for two turns, of which the restart below has some. Prompt graphs make of the
    // hundred executions a dozen.
    if tiny::full_matrix() {
        let bundle = tiny::bundle(
            &tiny::fixture(TINY),
            Variant { target: Some("v81"), prefill: &[32], ..CPU },
        );
        faults.walk("chat", None, &bundle, |model| chat(model, &goldens, 2, 0));
    }
}

#[tier(qnn)]
fn a_restart_of_the_dsp_changes_no_token() {
    let faults = Faults::open();
    let goldens = tiny::goldens(&tiny::fixture(TINY));
    let mut model = faults.model(&bundle()).unwrap();
    let contexts = model.context_loads().len() as u64;
    faults.plan(&Plan::default());
    let expected = generate(&mut model, &goldens, 6).unwrap();
    let executions = faults.report().calls["graphExecute"];
    // In the prompt, in the answer, and at the ends of both.
    let faults_at = [(1, 1007), (executions - 3, 1011), (executions - 5, 1007), (executions, 1007)];
    for (nth, code) in faults_at.into_iter().take(if tiny::full_matrix() { 4 } else { 2 }) {
        faults.plan(&Plan::at("graphExecute", nth, Then::Restart(code)));
        assert_eq!(generate(&mut model, &goldens, 6).unwrap(), expected, "{code} at {nth}");
        let report = faults.report();
        assert_eq!(report.calls["contextCreateFromBinary"], contexts, "opened again, once");
        assert_eq!(report.alive["context"] as u64, contexts);
        assert_eq!(
            (report.calls["deviceCreate"], report.alive["device"]),
            (1, 1),
            "on a device opened again"
        );
        assert_eq!((report.calls["backendCreate"], report.alive["backend"]), (1, 1));
        assert_eq!(report.alive["power"], 1, "with the same vote for a power mode");
        assert!(report.violations.is_empty(), "{report:?}");
    }
    // In the second turn of a chat, whose beginning is in the state already.
    model.reset().unwrap();
    faults.plan(&Plan::default());
    let expected = chat(&mut model, &goldens, 4, 0).unwrap();
    let executions = faults.report().calls["graphExecute"];
    model.reset().unwrap();
    faults.plan(&Plan::at("graphExecute", executions, Then::Restart(1007)));
    assert_eq!(chat(&mut model, &goldens, 4, 0).unwrap(), expected);
    // What was made again serves the next turn as before.
    chat(&mut model, &goldens, 4, 1).unwrap();
    drop(model);
    faults.closed("restarts");
}

#[tier(qnn)]
fn contexts_of_all_models_close_before_a_device_is_opened() {
    let faults = Faults::open();
    let goldens = tiny::goldens(&tiny::fixture(TINY));
    let backend = faults.backend().unwrap();
    let plugins = tiny::plugins();
    let open = || {
        let backend = Arc::clone(&backend);
        tiny::open_by(&bundle(), backend, &plugins, &CancelToken::new()).unwrap()
    };
    let (mut first, mut second) = (open(), open());
    let expected = generate(&mut first, &goldens, 4).unwrap();
    assert_eq!(generate(&mut second, &goldens, 4).unwrap(), expected);
    let contexts = faults.report().alive["context"];
    faults.plan(&Plan::at("graphExecute", 1, Then::Restart(1007)));
    assert_eq!(generate(&mut first, &goldens, 4).unwrap(), expected);
    let report = faults.report();
    let until = report.order.iter().position(|call| call == "deviceCreate").unwrap();
    let freed = report.order[..until].iter().filter(|call| *call == "contextFree").count();
    assert_eq!(freed, contexts, "those of the model that has not noticed, too");
    // That one notices, and goes on with contexts of its own on the same new device.
    assert_eq!(generate(&mut second, &goldens, 4).unwrap(), expected);
    let report = faults.report();
    assert_eq!((report.calls["deviceCreate"], report.alive["context"]), (1, contexts));
    assert!(report.violations.is_empty(), "{:?}", report.violations);
    drop((first, second, backend));
    faults.closed("two models");
}

#[tier(qnn)]
fn a_dsp_that_does_not_stay_up_is_an_error() {
    let faults = Faults::open();
    let goldens = tiny::goldens(&tiny::fixture(TINY));
    let mut model = faults.model(&bundle()).unwrap();
    let expected = generate(&mut model, &goldens, 4).unwrap();
    let rule =
        |call: &str, nth, times, then| Rule { call: Some(call.to_owned()), nth, times, then };
    let plan = |rules: Vec<Rule>| faults.plan(&Plan { rules, ..Plan::default() });

    plan(vec![rule("graphExecute", 3, 2, Then::Restart(1007))]);
    let error = generate(&mut model, &goldens, 4).unwrap_err();
    explains(&error, 1007, "a second restart");
    says(&error, ErrorKind::DeviceLost, &["restarted again"]);
    assert_eq!(generate(&mut model, &goldens, 4).unwrap(), expected, "and it goes on");

    // It takes a while until the device can be opened again.
    let late = |times| rule("deviceCreate", 1, times, Then::Fail(14001));
    plan(vec![rule("graphExecute", 3, 1, Then::Restart(1007)), late(3)]);
    assert_eq!(generate(&mut model, &goldens, 4).unwrap(), expected, "a device that is late");
    // For more than a second in all.
    plan(vec![rule("graphExecute", 3, 1, Then::Restart(1007)), late(5)]);
    assert_eq!(generate(&mut model, &goldens, 4).unwrap(), expected, "a device that is later");
    plan(vec![rule("graphExecute", 3, 1, Then::Restart(1007)), late(1000)]);
    let error = generate(&mut model, &goldens, 4).unwrap_err();
    explains(&error, 14001, "a device that does not come back");
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    plan(vec![]);
    assert!(error.message().contains("after the DSP restarted"), "{error}");
    assert_eq!(generate(&mut model, &goldens, 4).unwrap(), expected, "and it goes on");

    let fails = rule("contextCreateFromBinary", 1, 1, Then::Fail(1002));
    plan(vec![rule("graphExecute", 3, 1, Then::Restart(1011)), fails]);
    let error = generate(&mut model, &goldens, 4).unwrap_err();
    explains(&error, 1002, "a context that cannot be opened again");
    assert!(error.message().contains("after the DSP restarted"), "{error}");
    assert_eq!(generate(&mut model, &goldens, 4).unwrap(), expected, "and it goes on");
    drop(model);
    faults.closed("restarts");
}
