//! libFuzzer's entry to the target `picture`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::picture(data);
});
