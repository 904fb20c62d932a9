//! Views of buffers.

#![allow(clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use qhx_op::harness::OpHarness;
use qhx_op::{DType, ErrorCode, View};

#[test]
fn a_view_reads_what_lies_in_it_and_nothing_else() {
    let checked = OpHarness::new().run(|host| {
        let buffer = host.allocate(12)?;
        host.f32s_mut(buffer).copy_from_slice(&[1.0, 2.0, 3.0]);
        let view = |dtype, offset, len| View { buffer, dtype, offset, len };
        let mut out = [0.0; 2];
        view(DType::F32, 0, 3).to_f32(host, 1, &mut out)?;
        assert_eq!(out, [2.0, 3.0]);
        view(DType::F16, 2, 5).to_f32(host, 0, &mut out)?;
        assert_eq!(out, [1.875, 0.0], "the upper half of 1.0, the lower half of 2.0");
        for (wrong, first) in [
            (view(DType::F32, 0, 3), 2),
            (view(DType::F32, 0, 9), 2),
            (view(DType::F32, 2, 2), 0),
            (view(DType::F16, 1, 2), 0),
            (view(DType::I8, 0, 12), 0),
            (view(DType::F32, usize::MAX, usize::MAX), usize::MAX),
        ] {
            let error = wrong.to_f32(host, first, &mut out).unwrap_err();
            assert_eq!(error.code(), ErrorCode::INTERNAL);
            assert!(error.message().contains("a buffer of 12 bytes"), "{error}");
        }
        Ok(())
    });
    checked.unwrap();
}
