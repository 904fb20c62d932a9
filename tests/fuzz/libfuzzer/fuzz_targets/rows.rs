//! libFuzzer's entry to the target `rows`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::rows(data);
});
