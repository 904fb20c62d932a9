//! Graphs that read caches which other graphs write.

use std::sync::{Arc, Mutex};

use qhx_kit::state::StateCarrier;
use qhx_op::harness::{OpHarness, graph, tensor};
use qhx_op::{DType, GraphId, GraphInfo, Host, Result, TensorInfo};

use crate::probe::{opened, probe};

const F32: DType = DType::F32;

/// The donor `a`: four rows of two values in two blocks.
fn donor() -> GraphInfo {
    let outputs = [tensor("new_k", F32, [2, 1, 2])];
    graph("a", [tensor("past_k", F32, [2, 4, 2])], outputs)
}

fn reader<const N: usize>(name: &str, inputs: [TensorInfo; N]) -> GraphInfo {
    graph(name, inputs, [])
}

fn graphs<const N: usize>(host: &Host, names: [&str; N]) -> Result<Vec<GraphId>> {
    names.into_iter().map(|name| host.require_graph("/graphs", name)).collect()
}

#[test]
fn a_reader_sees_the_donors_cache_and_its_row_of_the_same_step() {
    type Seen = Vec<(Vec<f32>, Vec<f32>)>;
    let seen = Arc::new(Mutex::new(Seen::new()));
    let (shared, mut value) = (seen.clone(), 0.0);
    let harness = OpHarness::new()
        .graph(donor())
        .graph(reader("b", [tensor("past_k", F32, [2, 4, 2]), tensor("row_k", F32, [2, 2])]))
        .graph(reader("c", [tensor("past_k", F32, [2, 4, 2])]))
        .script(move |step| {
            match step.graph() {
                "a" => {
                    value += 1.0;
                    step.set("new_k", &[value, value, -value, -value])?;
                }
                "b" => shared.lock().unwrap().push((step.input("past_k")?, step.input("row_k")?)),
                _ => assert_eq!(step.input("past_k")?, shared.lock().unwrap().last().unwrap().0),
            }
            Ok(())
        });
    let mut op = probe(harness, |host| {
        let graphs = graphs(host, ["a", "b", "c"])?;
        let mut state = StateCarrier::new(host, &[&graphs])?;
        state.check_complete(host, 0)?;
        assert_eq!(state.byte_len(host), 64, "one cache, not three");
        assert!(state.can_truncate());
        Ok(Box::new(move |host, token| {
            if token > 0 {
                state.truncate(token as usize)?;
            }
            graphs.iter().try_for_each(|&graph| host.execute(graph))?;
            state.commit(host, 0, 1)
        }))
    })
    .unwrap();
    for token in [0, 0, 0, 1] {
        op.decode(token).unwrap();
    }
    let cache = |rows: [f32; 4]| {
        let block = |sign: f32| rows.into_iter().flat_map(move |v| [sign * v; 2]);
        block(1.0).chain(block(-1.0)).collect::<Vec<_>>()
    };
    let row = |v: f32| vec![v, v, -v, -v];
    let zero = |cache: Vec<f32>| cache.into_iter().map(|v| v + 0.0).collect::<Vec<_>>();
    let found: Seen =
        seen.lock().unwrap().iter().map(|(past, row)| (zero(past.clone()), row.clone())).collect();
    assert_eq!(
        found,
        [
            (zero(cache([0.0; 4])), row(1.0)),
            (zero(cache([1.0, 0.0, 0.0, 0.0])), row(2.0)),
            (zero(cache([1.0, 2.0, 0.0, 0.0])), row(3.0)),
            // The third step's row is still in the cache; a mask hides it.
            (zero(cache([1.0, 2.0, 3.0, 0.0])), row(4.0)),
        ]
    );
}

#[test]
fn a_reader_without_a_fitting_donor_is_refused_by_name() {
    let past = || tensor("past_k", F32, [2, 4, 2]);
    let row = || tensor("row_k", F32, [2, 1, 2]);
    for (reader, order, parts) in [
        (reader("b", [past(), row()]), ["a", "b"], &[][..]),
        // Where its donor stands does not matter to who only reads the cache.
        (reader("b", [past()]), ["b", "a"], &[]),
        (
            reader("b", [past(), row()]),
            ["b", "a"],
            &["\"b\"", "row_k f32[2, 1, 2]", "new_k", "in their order"],
        ),
        (
            reader("b", [past(), tensor("row_k", F32, [2, 2, 2])]),
            ["a", "b"],
            &["\"b\"", "row_k f32[2, 2, 2]", "new_k f32[2, 1, 2] of graph \"a\""],
        ),
        (
            reader("b", [past(), tensor("row_k", DType::F16, [2, 1, 2])]),
            ["a", "b"],
            &["row_k f16[2, 1, 2]", "must be like"],
        ),
        (
            reader("b", [tensor("past_k", F32, [2, 5, 2])]),
            ["a", "b"],
            &["\"b\"", "past_k f32[2, 5, 2]", "2 blocks of 4 rows of 8 bytes"],
        ),
        (reader("b", [tensor("past_k", F32, [16])]), ["a", "b"], &["past_k f32[16]", "4 rows"]),
        (
            reader("b", [tensor("past_v", F32, [2, 4, 2])]),
            ["a", "b"],
            &["\"b\"", "past_v f32[2, 4, 2]", "no other graph takes past_v and gives new_v"],
        ),
    ] {
        let found = opened(OpHarness::new().graph(donor()).graph(reader), move |host| {
            let graphs = graphs(host, order)?;
            StateCarrier::new(host, &[&graphs]).map(|_| ())
        });
        let message = found.map_or_else(|e| e.to_string(), |_| String::new());
        assert_eq!(message.is_empty(), parts.is_empty(), "{order:?}: {message}");
        for part in parts {
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
    }
}

#[test]
fn a_donor_of_another_step_gives_no_row() {
    let inputs = [tensor("past_k", F32, [2, 4, 2]), tensor("row_k", F32, [2, 1, 2])];
    let found = opened(OpHarness::new().graph(donor()).graph(reader("b", inputs)), |host| {
        let graphs = graphs(host, ["a", "b"])?;
        StateCarrier::new(host, &[&graphs[..1], &graphs[1..]]).map(|_| ())
    });
    let error = found.unwrap_err().to_string();
    assert!(error.contains("a graph before it in the same step"), "{error}");
}
