//! libFuzzer's entry to the target `audio`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::audio(data);
});
