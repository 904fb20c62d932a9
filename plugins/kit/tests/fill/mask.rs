//! Causal masks, slot by slot.

use qhx_kit::fill::{CausalMask, FloatInput, MASK_VALUE, PaddingMask};
use qhx_op::harness::{OpHarness, OpenOp, graph, tensor};
use qhx_op::{DType, Result};

use crate::probe::{opened, probe};

/// `.` hidden, `o` visible, rows of `width`.
fn image(op: &OpenOp, graph: &str, name: &str, width: usize) -> Vec<String> {
    let show = |value: &f32| match *value {
        0.0 => 'o',
        v if (v - MASK_VALUE).abs() < 16.0 => '.',
        _ => '?',
    };
    let values = op.bound(graph, name).unwrap();
    values.chunks(width).map(|row| row.iter().map(show).collect()).collect()
}

/// An op with one mask over the graphs `a` and `b`.
fn masked<const RANK: usize>(
    mask: CausalMask,
    rows: usize,
    names: [&str; 2],
    dtypes: [DType; 2],
    shape: [usize; RANK],
) -> Result<OpenOp> {
    let harness = OpHarness::new()
        .graph(graph("a", [tensor(names[0], dtypes[0], shape)], []))
        .graph(graph("b", [tensor(names[1], dtypes[1], shape)], []));
    probe(harness, move |host| {
        let graphs = [host.require_graph("/", "a")?, host.require_graph("/", "b")?];
        let mut mask = mask.bind(host, &graphs, rows)?;
        Ok(Box::new(move |host, position| {
            mask.fill(host, position as usize);
            Ok(())
        }))
    })
}

#[test]
fn a_window_slides_over_a_full_cache() {
    let mask = CausalMask::new(5).named("local").window(3);
    let mut op = masked(mask, 1, ["local"; 2], [DType::F32, DType::F16], [1, 6]).unwrap();
    for (position, expected) in
        [(0, ".....o"), (1, "o....o"), (2, "oo...o"), (3, ".oo..o"), (5, "...ooo"), (1, "o....o")]
    {
        op.decode(position).unwrap();
        for graph in ["a", "b"] {
            assert_eq!(image(&op, graph, "local", 6), [expected], "position {position}");
        }
    }
}

#[test]
fn a_window_slides_round_a_ring() {
    // Slot p mod 4 holds position p; the two before the token are visible.
    let mask = CausalMask::new(4).window(3).ring();
    let mut op = masked(mask, 1, ["cmask"; 2], [DType::F32; 2], [1, 1, 1, 5]).unwrap();
    for (position, expected) in [
        (0, "....o"),
        (3, ".oo.o"),
        (4, "..ooo"),
        (5, "o..oo"),
        (6, "oo..o"),
        (4, "..ooo"),
        (2, "oo..o"),
    ] {
        op.decode(position).unwrap();
        assert_eq!(image(&op, "b", "cmask", 5), [expected], "position {position}");
    }
    // The graph inserts the token at its slot; the oldest of four positions gives way to it.
    let mask = CausalMask::new(4).window(3).ring();
    let mut op = masked(mask, 1, ["cmask"; 2], [DType::F32; 2], [1, 4]).unwrap();
    for (position, expected) in [(0, "o..."), (3, ".ooo"), (4, "o.oo"), (5, "oo.o")] {
        op.decode(position).unwrap();
        assert_eq!(image(&op, "a", "cmask", 4), [expected], "position {position}");
    }
}

#[test]
fn rows_of_a_chunk_see_the_ring_within_the_window() {
    let mask = CausalMask::new(4).window(3).ring();
    let mut op = masked(mask, 4, ["cmask"; 2], [DType::F32; 2], [4, 8]).unwrap();
    op.decode(0).unwrap();
    assert_eq!(image(&op, "a", "cmask", 8), ["....o...", "....oo..", "....ooo.", ".....ooo"]);
    op.decode(6).unwrap();
    assert_eq!(image(&op, "a", "cmask", 8), ["oo..o...", ".o..oo..", "....ooo.", ".....ooo"]);
    // Without a cache: a prompt from its first token on.
    let mask = CausalMask::new(0).window(2);
    let op = masked(mask, 3, ["cmask"; 2], [DType::F32; 2], [3, 3]).unwrap();
    assert_eq!(image(&op, "b", "cmask", 3), ["o..", "oo.", ".oo"]);
}

#[test]
fn tokens_of_an_image_see_each_other() {
    let seen = |mask: CausalMask, shape: [usize; 2], prefix: bool| {
        let harness = OpHarness::new().graph(graph("a", [tensor("cmask", DType::F32, shape)], []));
        probe(harness, move |host| {
            let graphs = [host.require_graph("/", "a")?];
            let mut mask = mask.bind(host, &graphs, 4)?;
            // Ten times the position, and the tokens that see each other.
            Ok(Box::new(move |host, step| {
                let (position, count) = (step as usize / 10, step as usize % 10);
                match prefix {
                    true => mask.fill_prefix(host, position, count),
                    false => mask.fill_together(host, position, count),
                }
                Ok(())
            }))
        })
        .unwrap()
    };
    let both_ways = |mask, shape| seen(mask, shape, false);
    let mut op = both_ways(CausalMask::new(2), [4, 6]);
    for (step, expected) in [
        (3, ["..ooo.", "..ooo.", "..ooo.", "..oooo"]),
        (10, ["o.o...", "o.oo..", "o.ooo.", "o.oooo"]),
        (14, ["o.oooo"; 4]),
        (12, ["o.oo..", "o.oo..", "o.ooo.", "o.oooo"]),
        (2, ["..oo..", "..oo..", "..ooo.", "..oooo"]),
    ] {
        op.decode(step).unwrap();
        assert_eq!(image(&op, "a", "cmask", 6), expected, "{step}");
    }
    // What lies behind is always within the window.
    let mut op = both_ways(CausalMask::new(4).window(2).ring(), [4, 8]);
    for (step, expected) in [
        (63, [".o..ooo.", "....ooo.", ".....oo.", "......oo"]),
        (60, [".o..o...", "....oo..", ".....oo.", "......oo"]),
    ] {
        op.decode(step).unwrap();
        assert_eq!(image(&op, "a", "cmask", 8), expected, "{step}");
    }
    // The graph inserts the tokens at their slots.
    let mut op = both_ways(CausalMask::new(6), [4, 6]);
    op.decode(13).unwrap();
    assert_eq!(image(&op, "a", "cmask", 6), ["oooo..", "oooo..", "oooo..", "ooooo."]);
    // A prompt that sees itself whole does so beyond the window.
    let mut op = seen(CausalMask::new(4).window(2).ring(), [4, 8], true);
    for (step, expected) in [
        (63, [".o..ooo.", "....ooo.", "....ooo.", "......oo"]),
        (62, [".o..oo..", "....oo..", ".....oo.", "......oo"]),
    ] {
        op.decode(step).unwrap();
        assert_eq!(image(&op, "a", "cmask", 8), expected, "{step}");
    }
    let mut op = seen(CausalMask::new(6).window(2).ring(), [4, 6], true);
    op.decode(63).unwrap();
    assert_eq!(image(&op, "a", "cmask", 6), ["ooo..o", "ooo...", "ooo...", "..oo.."]);
}

/// Graphs `a` and `b` with a mask, and `c` without.
fn two_of_three() -> OpHarness {
    let mask = |name| graph(name, [tensor("cmask", DType::F32, [1, 4])], []);
    OpHarness::new().graph(mask("a")).graph(mask("b")).graph(graph("c", [], []))
}

#[test]
fn a_graph_without_a_mask_needs_none() {
    let op = opened(two_of_three(), |host| {
        let graphs = ["a", "b", "c"].map(|name| host.find_graph(name).unwrap());
        let mut mask = CausalMask::new(3).bind(host, &graphs, 1)?;
        assert!(!mask.is_empty());
        mask.fill(host, 2);
        assert!(CausalMask::new(3).named("other").bind(host, &graphs, 1)?.is_empty());
        assert!(CausalMask::new(3).bind(host, &graphs[2..], 1)?.is_empty());
        Ok(())
    })
    .unwrap();
    for graph in ["a", "b"] {
        assert_eq!(image(&op, graph, "cmask", 4), ["oo.o"]);
    }
}

#[test]
fn one_write_reaches_all_graphs_whose_inputs_are_alike() {
    let op = opened(two_of_three(), |host| {
        let graphs = ["a", "b", "c"].map(|name| host.find_graph(name).unwrap());
        let inputs = FloatInput::bind_all(host, &graphs, "cmask")?;
        assert_eq!(inputs.len(), 1);
        inputs[0].fill(host, 3.0);
        inputs[0].write_at(host, 2, &[7.0])
    })
    .unwrap();
    for graph in ["a", "b"] {
        assert_eq!(op.bound(graph, "cmask").unwrap(), [3.0, 3.0, 7.0, 3.0]);
    }
}

#[test]
fn a_value_too_many_or_too_few_names_the_tensor() {
    let harness = OpHarness::new().graph(graph(
        "g",
        [tensor("gain", DType::F16, [2, 2]), tensor("ids", DType::I32, [2])],
        [],
    ));
    let op = opened(harness, |host| {
        let graph = host.require_graph("/", "g")?;
        let input = FloatInput::require(host, graph, "gain")?;
        let message = |r: Result<()>| r.unwrap_err().message().to_owned();
        assert_eq!(
            message(input.write(host, &[1.0; 3])),
            "graph \"g\": tensor gain f16[2, 2]: found 3 values, expected 4"
        );
        for first in [2, usize::MAX] {
            let found = message(input.write_at(host, first, &[1.0; 3]));
            assert!(found.contains("gain f16[2, 2]: found 3 values from element"), "{found}");
        }
        let ids = FloatInput::require(host, graph, "ids").unwrap_err();
        assert!(ids.message().contains("ids i32[2] is i32, expected f16 or f32"), "{ids}");
        let other = FloatInput::require(host, graph, "other").unwrap_err();
        assert!(other.message().contains("has no input \"other\""), "{other}");
        input.write(host, &[1.0, 2.0, 3.0, -4.5])
    })
    .unwrap();
    assert_eq!(op.bound("g", "gain").unwrap(), [1.0, 2.0, 3.0, -4.5]);
}

#[test]
fn a_mask_that_does_not_fit_names_what_would() {
    let open = |mask: CausalMask, rows, shape| {
        let result = masked(mask, rows, ["m", "cmask"], [DType::F32; 2], shape);
        result.map_or_else(|e| e.to_string(), |_| String::new())
    };
    let ring = |capacity| CausalMask::new(capacity).ring();
    for (mask, rows, shape, parts) in [
        (ring(3).window(4), 1, [1, 4], &[][..]),
        (
            ring(2).window(4),
            1,
            [1, 3],
            &["\"b\"", "cmask f32[1, 3]", "at least 3 slots", "found 2"],
        ),
        (ring(3).window(4), 1, [1, 3], &["at least 4 slots", "window of 4 positions", "found 3"]),
        (ring(3), 1, [1, 4], &["a window"]),
        (CausalMask::new(3).window(0), 1, [1, 4], &["a window"]),
        (CausalMask::new(3), 2, [2, 4], &["2 rows of 5 values", "or 3 (the cache)"]),
        (CausalMask::new(3), 2, [5, 2], &["2 rows of 5 values"]),
        (CausalMask::new(3), 0, [1, 4], &["0 rows"]),
        (CausalMask::new(usize::MAX), 1, [1, 4], &["1 rows of"]),
    ] {
        let message = open(mask, rows, shape);
        assert_eq!(message.is_empty(), parts.is_empty(), "{mask:?}: {message}");
        for part in parts {
            assert!(message.contains(part), "{mask:?}: {message:?} lacks {part:?}");
        }
    }
}

#[test]
fn shards_of_an_encoder_read_one_padding_mask() {
    let mask = |name, rows| graph(name, [tensor("cmask", DType::F16, [rows, 4])], []);
    let harness = OpHarness::new().graph(mask("a", 1)).graph(mask("b", 4));
    let mut op = probe(harness, |host| {
        let graphs = [host.require_graph("/", "a")?, host.require_graph("/", "b")?];
        let mut mask = PaddingMask::bind_all(host, &graphs, 4, false)?;
        Ok(Box::new(move |host, real| {
            mask.fill(host, real as usize);
            Ok(())
        }))
    })
    .unwrap();
    for (real, row) in [(3, "ooo."), (1, "o..."), (4, "oooo")] {
        op.decode(real).unwrap();
        assert_eq!(image(&op, "a", "cmask", 4), [row]);
        assert_eq!(image(&op, "b", "cmask", 4), [row; 4]);
    }
}
