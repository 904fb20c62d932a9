//! Dense layers on the host, called from an op.

use qhx_kit::kernels::Linear;
use qhx_op::harness::OpHarness;

use super::{assert_close, values};

const INPUTS: usize = 37;
const OUTPUTS: usize = 53;
const ROWS: usize = 300;

#[test]
fn a_dense_layer_multiplies_every_row_and_adds_its_bias() {
    let checked = OpHarness::new().run(|host| {
        let (weight, bias) = (values(INPUTS * OUTPUTS, 1), values(OUTPUTS, 2));
        let rows = values(ROWS * INPUTS, 3);
        let mut expected = vec![0.0; ROWS * OUTPUTS];
        for (row, target) in rows.chunks(INPUTS).zip(expected.chunks_mut(OUTPUTS)) {
            for ((weight, bias), to) in weight.chunks(INPUTS).zip(&bias).zip(target) {
                let sum: f64 = row.iter().zip(weight).map(|(a, b)| f64::from(a * b)).sum();
                *to = (sum + f64::from(*bias)) as f32;
            }
        }
        let layer = Linear::new(&weight, Some(&bias), INPUTS, OUTPUTS)?;
        let mut found = vec![f32::NAN; ROWS * OUTPUTS];
        layer.write(host, &rows, &mut found)?;
        assert_close(&found, &expected, 1e-5, "weights and bias");
        layer.add(host, &rows, &mut found)?;
        let twice: Vec<_> = expected.iter().map(|value| 2.0 * value).collect();
        assert_close(&found, &twice, 1e-5, "added");
        let plain = Linear::new(&weight, None, INPUTS, OUTPUTS)?;
        plain.write(host, &rows[..INPUTS], &mut found[..OUTPUTS])?;
        let unbiased: Vec<_> = expected.iter().zip(&bias).map(|(a, b)| a - b).collect();
        assert_close(&found[..OUTPUTS], &unbiased[..OUTPUTS], 1e-5, "one row without bias");
        layer.write(host, &[], &mut [])?;
        for (source, target) in
            [(INPUTS + 1, OUTPUTS), (INPUTS, OUTPUTS - 1), (2 * INPUTS, OUTPUTS)]
        {
            let error = layer.write(host, &rows[..source], &mut found[..target]).unwrap_err();
            assert!(error.message().contains("from 37 to 53"), "{error}");
        }
        assert!(Linear::new(&weight, None, INPUTS, OUTPUTS + 1).is_err());
        assert!(Linear::new(&weight, Some(&bias[1..]), INPUTS, OUTPUTS).is_err());
        assert!(Linear::new(&[], None, 0, usize::MAX).is_err());
        Ok(())
    });
    checked.unwrap();
}
