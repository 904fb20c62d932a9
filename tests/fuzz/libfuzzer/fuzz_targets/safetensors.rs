//! libFuzzer's entry to the target `safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::safetensors(data);
});
