//! libFuzzer's entry to the target `chat_template`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::chat_template(data);
});
