//! Rotary tables. The numbers come from the formulae of `transformers` (`modeling_rope_utils.py`,
//! `modeling_qwen2_vl.py`, `modeling_qwen3_vl.py`), computed apart in 64-bit floats.

use qhx_kit::fill::{Rope, RopeParams, RopeScaling, Sections};
use qhx_op::harness::{OpHarness, OpenOp, graph, tensor};
use qhx_op::{DType, GraphId, Host, Result, TensorInfo};
use serde_json::json;

use crate::probe::{close, opened, probe};

const PROPORTIONAL: RopeScaling =
    RopeScaling::Proportional { partial_rotary_factor: 0.25, factor: 1.0 };

fn graphs<const N: usize>(host: &Host, names: [&str; N]) -> Result<Vec<GraphId>> {
    names.into_iter().map(|name| host.require_graph("/graphs", name)).collect()
}

fn tables<const RANK: usize>(
    names: [&str; 2],
    dtype: DType,
    shape: [usize; RANK],
) -> [TensorInfo; 2] {
    names.map(|name| tensor(name, dtype, shape))
}

#[track_caller]
fn check(op: &OpenOp, graph: &str, name: &str, expected: &[f32]) {
    close(&op.bound(graph, name).unwrap(), expected, 2e-5);
}

#[test]
fn two_ropes_of_two_bases_fill_their_own_inputs_of_all_shards() {
    let [cos, sin] = tables(["cos", "sin"], DType::F32, [2, 8]);
    let [cos_local, sin_local] = tables(["cos_local", "sin_local"], DType::F32, [2, 4]);
    let both = [cos, sin, cos_local.clone(), sin_local.clone()];
    let harness =
        OpHarness::new().graph(graph("a", both, [])).graph(graph("b", [cos_local, sin_local], []));
    let mut op = probe(harness, |host| {
        let graphs = graphs(host, ["a", "b"])?;
        let mut global = Rope::new(16, 1e6)?.scaled(PROPORTIONAL)?;
        let mut local = Rope::new(8, 1e4)?.named("cos_local", "sin_local");
        let mut tables = [global.bind_all(host, &graphs, 2)?, local.bind_all(host, &graphs, 2)?];
        Ok(Box::new(move |host, first| {
            tables[0].fill(host, &mut global, first as usize);
            tables[1].fill(host, &mut local, first as usize);
            Ok(())
        }))
    })
    .unwrap();
    // Another position first: what a table held before must not stay.
    op.decode(100).unwrap();
    op.decode(7).unwrap();
    let still = |turned: [f32; 4], rest: f32| {
        let [a, b, c, d] = turned;
        [&[a, b][..], &[rest; 6], &[c, d], &[rest; 6]].concat()
    };
    check(&op, "a", "cos", &still([0.753902, 0.320257, -0.145500, 0.147631], 1.0));
    check(&op, "a", "sin", &still([0.656987, 0.947331, 0.989358, 0.989042], 0.0));
    for graph in ["a", "b"] {
        let cos = [0.753902, 0.764842, 0.997551, 0.999976, -0.145500, 0.696707, 0.996802, 0.999968];
        let sin = [0.656987, 0.644218, 0.069943, 0.007000, 0.989358, 0.717356, 0.079915, 0.008000];
        check(&op, graph, "cos_local", &cos);
        check(&op, graph, "sin_local", &sin);
    }
}

#[test]
fn graphs_share_rotary_tables_in_the_form_that_each_has() {
    let harness = OpHarness::new()
        .graph(graph("a", tables(["cos", "sin"], DType::F32, [2, 2]), []))
        .graph(graph("b", tables(["cos", "sin"], DType::F16, [2, 4]), []))
        .graph(graph("c", tables(["cos", "sin"], DType::F32, [2, 2]), []));
    let mut op = probe(harness, |host| {
        let graphs = graphs(host, ["a", "b", "c"])?;
        let mut rope = Rope::new(4, 1e4)?;
        let mut tables = rope.bind_all(host, &graphs, 2)?;
        Ok(Box::new(move |host, first| {
            tables.fill(host, &mut rope, first as usize);
            Ok(())
        }))
    })
    .unwrap();
    for first in [0, 2, 0, 0] {
        op.decode(first).unwrap();
        for (name, turn) in [("cos", f32::cos as fn(f32) -> f32), ("sin", f32::sin)] {
            // Angles p and p / 100 of two positions.
            let angles = [first, first + 1].map(|p| [p as f32, p as f32 * 1e4_f32.powf(-0.5)]);
            let half: Vec<f32> = angles.into_iter().flatten().map(turn).collect();
            check(&op, "a", name, &half);
            check(&op, "c", name, &half);
            let both = [&half[..2], &half[..2], &half[2..], &half[2..]].concat();
            close(&op.bound("b", name).unwrap(), &both, 1e-3);
        }
    }
}

#[test]
fn a_proportional_table_is_half_whole_or_the_turned_pairs() {
    let widths = [("half", 4), ("whole", 8), ("turned", 2)];
    let harness = OpHarness::new().graphs(
        widths.map(|(name, width)| graph(name, tables(["cos", "sin"], DType::F32, [1, width]), [])),
    );
    let mut op = probe(harness, |host| {
        let scaling = RopeScaling::Proportional { partial_rotary_factor: 0.5, factor: 2.0 };
        let mut rope = Rope::new(8, 1e4)?.scaled(scaling)?;
        let graphs = graphs(host, ["half", "whole", "turned"])?;
        let mut tables = rope.bind_all(host, &graphs, 1)?;
        Ok(Box::new(move |host, position| {
            tables.fill(host, &mut rope, position as usize);
            Ok(())
        }))
    })
    .unwrap();
    op.decode(3).unwrap();
    for (name, turned, rest) in
        [("cos", [0.070737, 0.988771], 1.0), ("sin", [0.997495, 0.149438], 0.0)]
    {
        let half = [turned[0], turned[1], rest, rest];
        check(&op, "turned", name, &turned);
        check(&op, "half", name, &half);
        check(&op, "whole", name, &[half, half].concat());
    }
}

#[test]
fn each_pair_of_m_rope_turns_by_its_component_of_the_position() {
    for (sections, cos, sin) in [
        (
            Sections::Interleaved([3, 3, 2]),
            [-0.653644, -0.973104, -0.956644, 0.757506, 0.825336, 0.874638, 0.992011, 0.994313],
            [-0.756802, -0.230367, 0.291259, 0.652828, 0.564642, 0.484776, 0.126154, 0.106494],
        ),
        (
            Sections::Chunked([3, 3, 2]),
            [-0.653644, -0.627680, 0.301137, 0.482782, 0.825336, 0.943617, 0.959773, 0.987220],
            [-0.756802, 0.778472, 0.953581, 0.875741, 0.564642, 0.331039, 0.280778, 0.159363],
        ),
    ] {
        let harness =
            OpHarness::new().graph(graph("g", tables(["cos", "sin"], DType::F32, [3, 8]), []));
        let mut op = probe(harness, move |host| {
            let graphs = graphs(host, ["g"])?;
            let mut rope = Rope::new(16, 100.0)?.sectioned(sections)?;
            let mut tables = rope.bind_all(host, &graphs, 3)?;
            Ok(Box::new(move |host, token| match token {
                0 => tables.fill_at(host, &mut rope, &[[5; 3], [4, 6, 9]]),
                1 => tables.fill_at(host, &mut rope, &[[0; 3]; 4]),
                first => {
                    tables.fill(host, &mut rope, first as usize);
                    Ok(())
                }
            }))
        })
        .unwrap();
        let plain =
            [0.283662, -0.946079, -0.010342, 0.630080, 0.877583, 0.960731, 0.987526, 0.996050];
        op.decode(5).unwrap();
        op.decode(0).unwrap();
        let found = op.bound("g", "cos").unwrap();
        close(&found[..8], &plain, 2e-5);
        close(&found[8..16], &cos, 2e-5);
        close(&op.bound("g", "sin").unwrap()[8..16], &sin, 2e-5);
        let error = op.decode(1).unwrap_err();
        assert!(error.message().contains("4 positions do not fit into rotary tables of 3 rows"));
        // Rows of given positions are no reason to leave a table of consecutive ones as it is.
        op.decode(5).unwrap();
        close(&op.bound("g", "cos").unwrap()[..8], &plain, 2e-5);
        assert!((op.bound("g", "cos").unwrap()[8] - 6f32.cos()).abs() < 1e-5);
    }
}

#[test]
fn the_manifest_declares_what_ropes_are_made_for() {
    let manifest = json!({"params": {
        "head_dim": 16, "partial_rotary_factor": 0.5, "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local": {"rotary_dim": 8},
        "rope_vision": {"head_dim": 16, "rope_theta": 100.0, "rope_scaling":
            {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": true}},
        "rope_full": {"head_dim": 16, "rope_theta": 1e6, "rope_scaling":
            {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
        "rope_long": {"rotary_dim": 4, "rope_scaling":
            {"rope_type": "factors", "factors": [1.0, 3.5], "attention_factor": 1.25}},
    }});
    opened(OpHarness::new().manifest(manifest), |host| {
        let read = |pointer: &str| RopeParams::read(host, pointer);
        let found = read("/params")?;
        assert_eq!((found.rotary_dim, found.theta), (Some(8), Some(1e6)));
        assert_eq!(found.scaling, Some(RopeScaling::Linear { factor: 8.0 }));
        let found = read("/params/rope_local")?;
        assert_eq!((found.rotary_dim, found.theta, found.scaling), (Some(8), None, None));
        assert_eq!(read("/params/rope_vision")?.sections, Some(Sections::Interleaved([3, 3, 2])));
        assert_eq!(read("/params/rope_full")?.scaling, Some(PROPORTIONAL));
        let found = read("/params/rope_long")?;
        assert_eq!((found.factors, found.attention_factor), (Some(vec![1.0, 3.5]), Some(1.25)));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_rope_that_cannot_be_is_an_error_with_its_reason() {
    let open = |params: serde_json::Value, width: usize| {
        let harness = OpHarness::new().manifest(json!({"params": {"local": params}})).graph(graph(
            "g",
            tables(["cos_local", "sin_local"], DType::F16, [1, width]),
            [],
        ));
        opened(harness, |host| {
            let graphs = graphs(host, ["g"])?;
            let rope = Rope::from_params(host, "/params/local")?.named("cos_local", "sin_local");
            rope.bind_all(host, &graphs, 1).map(|_| ())
        })
        .map_or_else(|e| e.to_string(), |_| String::new())
    };
    let proportional =
        |share: f64| json!({"rope_type": "proportional", "partial_rotary_factor": share});
    for (params, width, parts) in [
        (json!({"head_dim": 8}), 4, &[][..]),
        (json!({}), 4, &["rotary_dim or head_dim is missing", "cos_local and sin_local", "\"g\""]),
        (json!({"head_dim": 7}), 4, &["manifest /params/local", "rotary dimension 7"]),
        (json!({"head_dim": 1e9 as u64}), 4, &["rotary dimension 1000000000"]),
        (json!({"head_dim": 8, "rope_theta": 0}), 4, &["manifest /params/local", "theta 0"]),
        (json!({"head_dim": 8}), 3, &["cos_local f16[1, 3]", "1 rows of 4 values", "8 (both"]),
        (
            json!({"head_dim": 8, "rope_scaling": proportional(0.5)}),
            3,
            &["1 rows of 4 values", "2 (the pairs that turn)"],
        ),
        (
            json!({"head_dim": 8, "rope_scaling": proportional(0.1)}),
            4,
            &["manifest /params/local", "rope_scaling", "lets a pair turn"],
        ),
        (
            json!({"head_dim": 8, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2]}}),
            4,
            &["manifest /params/local", "mrope_section [2, 2, 2]", "add up to 4"],
        ),
        (
            json!({"head_dim": 8, "rope_scaling": {"rope_type": "yarn"}}),
            4,
            &["manifest /params/local/rope_scaling", "yarn"],
        ),
        (
            json!({"head_dim": 8, "rope_scaling": {"rope_type": "factors"}}),
            4,
            &["/params/local/rope_scaling/factors"],
        ),
        (
            json!({"head_dim": 8, "rope_scaling": {"rope_type": "factors", "factors": [1.0]}}),
            4,
            &["manifest /params/local", "1 factors", "expected 4 factors"],
        ),
    ] {
        let message = open(params.clone(), width);
        assert_eq!(message.is_empty(), parts.is_empty(), "{params}: {message}");
        for part in parts {
            assert!(message.contains(part), "{params}: {message:?} lacks {part:?}");
        }
    }
    let one = OpHarness::new().graph(graph("g", [tensor("cos", DType::F32, [1, 4])], []));
    let error = opened(one, |host| {
        let graphs = graphs(host, ["g"])?;
        Rope::new(8, 1e4)?.bind_all(host, &graphs, 1).map(|_| ())
    });
    assert!(error.unwrap_err().message().contains("has no input \"sin\""));
}
