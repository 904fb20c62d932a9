//! libFuzzer's entry to the target `gguf`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::gguf(data);
});
