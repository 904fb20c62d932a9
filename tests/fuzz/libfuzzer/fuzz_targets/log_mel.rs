//! libFuzzer's entry to the target `log_mel`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::log_mel(data);
});
