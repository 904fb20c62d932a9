//! libFuzzer's entry to the target `onnx_weights`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::onnx_weights(data);
});
