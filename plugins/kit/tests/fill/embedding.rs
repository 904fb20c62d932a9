//! Embedding tables: several, in either float type and in int8, with a factor.

use half::f16;
use qhx_kit::fill::Embedding;
use qhx_op::DType;
use qhx_op::harness::{OpHarness, graph, tensor};
use serde_json::json;

use crate::probe::{close, opened, probe};

/// Rows of three values for four tokens.
const TABLE: [f32; 12] = [0.5, -1.25, 2.0, 3.0, 0.1, -0.2, 100.0, -7.75, 0.0, 1.0, 2.5, -3.0];

fn harness() -> OpHarness {
    let halves: Vec<u8> = TABLE.iter().flat_map(|v| f16::from_f32(*v).to_ne_bytes()).collect();
    let floats: Vec<u8> = TABLE.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let scales = TABLE.chunks(3).map(|row| row.iter().fold(0f32, |a, b| a.max(b.abs())) / 127.0);
    let scales: Vec<f32> = scales.collect();
    let integers = TABLE.iter().zip(0..).map(|(v, at)| (v / scales[at / 3]).round() as i8 as u8);
    let mut integers: Vec<u8> = integers.collect();
    integers.extend(scales.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()));
    // Rows of two blocks of two.
    let mut blocks: Vec<u8> = [1i8, 2, -3, 4, 5, 6, -7, 8].map(|v| v as u8).to_vec();
    blocks.extend([1f32, 10.0, 0.5, -2.0].iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()));
    OpHarness::new()
        .manifest(json!({"artifacts": {
            "embed": "halves", "embed_layers": {"path": "floats", "dtype": "f32"},
            "int8": {"path": "integers", "dtype": "i8"},
            "blocks": {"path": "blocks", "dtype": "i8", "block": 2},
            "odd": {"path": "blocks", "dtype": "i8", "block": 3},
        }}))
        .file("integers", integers)
        .file("blocks", blocks)
        .file("halves", halves)
        .file("floats", floats)
        .graph(graph(
            "g",
            [tensor("f16", DType::F16, [3, 3]), tensor("f32", DType::F32, [3, 3])],
            [],
        ))
}

#[test]
fn rows_of_any_table_are_scaled_into_any_float_input() {
    for pointer in ["/artifacts/embed", "/artifacts/embed_layers", "/artifacts/int8"] {
        for (factor, input) in [(1.0, 0), (1.0, 1), (50.5, 0), (1.732_050_8, 1)] {
            let name = ["f16", "f32"][input];
            let mut op = probe(harness(), move |host| {
                let table = Embedding::open_at(host, pointer, 3, Some(4))?.scaled(factor)?;
                assert_eq!((table.vocab(), table.hidden()), (4, 3));
                let graph = host.require_graph("/", "g")?;
                let x = table.bind(host, graph, name, 3)?;
                Ok(Box::new(move |host, _| {
                    table.fill(host, &[3, 1, 3], &x)?;
                    table.fill(host, &[2, 1], &x)
                }))
            })
            .unwrap();
            op.decode(0).unwrap();
            let expected: Vec<f32> = TABLE[6..9]
                .iter()
                .chain(&TABLE[3..6])
                .map(|v| v * factor)
                .chain([0.0; 3])
                .collect();
            let found = op.bound("g", name).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                // One rounding of the table, where it is f16, and one of the input; to half an integer of int8, whose
                // rows reach 100 and 3.
                let tolerance = match pointer {
                    "/artifacts/embed_layers" if input == 1 => 1e-6 * expected.abs(),
                    "/artifacts/int8" => factor * 0.5 * 101.0 / 127.0 + 1e-3 * expected.abs(),
                    _ => 1e-3 * expected.abs(),
                };
                close(&[*found], &[*expected], tolerance);
            }
        }
    }
}

#[test]
fn columns_of_a_row_are_read_for_arithmetic_on_the_host() {
    opened(harness(), |host| {
        let table = Embedding::open_at(host, "/artifacts/embed_layers", 3, None)?.scaled(16.0)?;
        let mut out = [0.0; 2];
        table.read(host, 2, 1, &mut out)?;
        assert_eq!(out, [-124.0, 0.0]);
        let blocks = Embedding::open_at(host, "/artifacts/blocks", 4, Some(2))?.scaled(2.0)?;
        let mut all = [0.0; 3];
        blocks.read(host, 1, 1, &mut all)?;
        assert_eq!(all, [6.0, 28.0, -32.0]);
        assert!(blocks.table().unwrap_err().message().contains("blocks: values of i8"));
        let wide = table.read(host, 2, 2, &mut out).unwrap_err();
        assert!(wide.message().contains("columns 2 to 4 of rows of 3"), "{wide}");
        assert!(table.read(host, 2, usize::MAX, &mut out).is_err());
        let token = table.read(host, 4, 0, &mut out).unwrap_err();
        assert!(token.message().contains("token 4 is outside the vocabulary of 4"), "{token}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_table_that_does_not_fit_names_its_file_and_pointer() {
    opened(harness(), |host| {
        let mut fail = |pointer: &str, hidden, vocab| {
            Embedding::open_at(host, pointer, hidden, vocab).unwrap_err().to_string()
        };
        let missing = fail("/artifacts/other", 3, None);
        assert!(missing.contains("manifest /artifacts/other: missing"), "{missing}");
        let odd = fail("/artifacts/odd", 4, None);
        assert!(odd.contains("/artifacts/odd/block: found 3, expected a divisor of 4"), "{odd}");
        let short = fail("/artifacts/int8", 4, None);
        assert!(short.contains("integers: 20 bytes are no whole number of rows of 4"), "{short}");
        let rows = fail("/artifacts/embed", 5, None);
        assert!(rows.contains("halves: 24 bytes are no whole number of rows of 5"), "{rows}");
        assert!(fail("/artifacts/embed", usize::MAX, None).contains("halves: 24 bytes"));
        let vocab = fail("/artifacts/embed_layers", 3, Some(usize::MAX));
        assert!(vocab.contains("floats: 48 bytes are 4 rows"), "{vocab}");
        let table = Embedding::open(host, 3, None)?;
        let graph = host.require_graph("/", "g")?;
        let wide = table.bind(host, graph, "f16", 2).unwrap_err();
        assert!(wide.message().contains("f16 f16[3, 3]: expected 2 x 3 values, rows of halves"));
        let x = table.bind(host, graph, "f16", 3)?;
        let many = table.fill(host, &[0; 4], &x).unwrap_err();
        assert!(many.message().contains("4 tokens do not fit into a graph's input of 3 rows"));
        assert!(table.scaled(f32::NAN).unwrap_err().message().contains("halves: a factor of NaN"));
        Ok(())
    })
    .unwrap();
}
