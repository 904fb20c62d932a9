//! A device that is lost, and what that costs whom.

use qhx::Bundle;
use serde_json::json;

use crate::bundles::{Running, builder, language, options, runtime};
use crate::restarting::Restarting;

#[test]
fn a_lost_device_costs_its_request_and_nobody_else() {
    let chosen = runtime().choose(&Bundle::open(language()).unwrap()).unwrap();
    let backend = Restarting::new(chosen.backend);
    let over = builder().executed_by(backend.clone()).build();
    let running = Running::start(options([("language", language())]).runtime(over));
    let body = json!({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8});
    let ask = || running.client.post("/v1/completions", &body);
    let text = || ask().status(200).json()["choices"][0]["text"].clone();
    let before = text();
    // One that comes back costs nobody anything.
    backend.restart_at(4);
    assert_eq!(text(), before);
    // One that is lost again on the way is given up.
    backend.restart_times(2);
    let refused = ask();
    assert_eq!(refused.header("retry-after"), Some("2"));
    let error = refused.refuses(503, "code", "device_lost");
    assert_eq!(error["type"], "overloaded_error");
    assert_eq!(text(), before);
    running.client.get("/health").status(200);
}
