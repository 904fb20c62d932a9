//! `/v1/audio/speech`.

use serde_json::json;

use crate::bundles::{Running, options, shared, speaking};
use crate::client::with;

const SPEECH: &str = "/v1/audio/speech";

#[test]
fn a_text_becomes_audio_in_each_format() {
    let running = Running::start(options([("speaking", speaking())]));
    let client = &running.client;
    let body = json!({"model": "speaking", "input": "Hello there.", "voice": "bm_two", "response_format": "wav"});
    let wav = client.post(SPEECH, &body).status(200);
    assert_eq!(wav.header("content-type"), Some("audio/wav"));
    let bytes = wav.body.clone();
    assert!(bytes.starts_with(b"RIFF") && &bytes[8..12] == b"WAVE", "{:?}", &bytes[..16]);
    assert_eq!(u32::from_le_bytes(bytes[40..44].try_into().unwrap()) as usize, bytes.len() - 44);
    let ask = |more: serde_json::Value| {
        let body = with(body.clone(), more);
        client.post(SPEECH, &body)
    };
    let pcm = ask(json!({"response_format": "pcm"})).status(200);
    assert_eq!(pcm.header("content-type"), Some("audio/pcm"));
    assert_eq!(pcm.body, bytes[44..], "the same samples without a header");
    let seconds = |bytes: Vec<u8>| {
        let source = qhx::Source::Bytes { name: "answer".to_owned(), bytes };
        let rules = qhx_media::AudioRules::default();
        let audio = qhx_media::decode_audio(&source, &rules, &qhx::Limits::default()).unwrap();
        audio.samples.len() as f64 / f64::from(audio.rate)
    };
    let length = seconds(bytes.clone());
    for (format, kind) in [
        (json!(null), "audio/mpeg"),
        (json!("mp3"), "audio/mpeg"),
        (json!("opus"), "audio/ogg"),
        (json!("flac"), "audio/flac"),
        (json!("aac"), "audio/aac"),
    ] {
        let found = ask(json!({"response_format": format})).status(200);
        assert_eq!(found.header("content-type"), Some(kind), "{format}");
        // AAC has the encoder's delay in front.
        assert!((seconds(found.body) - length).abs() < 0.13, "{format}");
    }
    let fast = ask(json!({"speed": 2.0})).status(200);
    assert!(fast.body.len() < bytes.len(), "{} {}", fast.body.len(), bytes.len());
    for (more, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": "a".repeat(4097)}), "input"),
        (json!({"voice": "zoe"}), "voice"),
        (json!({"speed": 0}), "speed"),
        (json!({"response_format": "wma"}), "response_format"),
    ] {
        ask(more).refuses(400, "param", param);
    }
    ask(json!({"response_format": "wma"})).status(400).says("wav, pcm, flac, mp3, opus, aac");
    ask(json!({"voice": "zoe"})).status(400).says("it has af_one, bm_two");
    // OpenAI's voices stand for the model's.
    for (voice, own) in [("alloy", "af_one"), ("ash", "bm_two"), ("verse", "af_one")] {
        let found = ask(json!({"voice": voice})).status(200).body;
        assert_eq!(found, ask(json!({"voice": own})).status(200).body, "{voice}");
    }
    for (input, what) in [("", "the text is empty"), ("😀", "has a sound"), ("дом", "Cyrillic")]
    {
        ask(json!({"input": input})).status(400).says(what);
    }
}

#[test]
fn a_server_without_a_voice_says_what_would_speak() {
    let error = shared().client.post(SPEECH, &json!({"input": "Hello."})).status(501).error();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("speak") && message.contains("kokoro_speak"), "{error}");
}
