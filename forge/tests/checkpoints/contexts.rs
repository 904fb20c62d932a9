//! Plans for several contexts and for long ones.

use qhx_forge::plan::{Plan, plan};
use qhx_forge::registry::recipe;
use qhx_forge::{Caches, ForgeOptions, Precision};

/// Plan of a model of Llama-3.2-1B's shapes, over 32,768 positions.
fn planned(edit: impl FnOnce(&mut ForgeOptions)) -> Plan {
    let mut options = ForgeOptions {
        max_ctx: Some(32_768),
        share_weights: true,
        precision: Precision::W4A16,
        ..ForgeOptions::new("out")
    };
    edit(&mut options);
    plan(&crate::configured("llama-3.2-1b.json"), recipe, &options, true).unwrap().0
}

#[test]
fn caches_of_int8_take_half_beside_their_scales() {
    let [plain, int8] = [Caches::F16, Caches::Int8].map(|caches| {
        let options = |options: &mut ForgeOptions| {
            (options.caches, options.prefill) = (caches, Some(Vec::new()));
        };
        planned(options).contexts[0].io_bytes
    });
    // Of 64 values a byte each is saved, for two of a scale.
    assert_eq!(plain - int8, 2 * 16 * 8 * 32_768 * (64 - 2));
}

#[test]
fn graphs_of_one_context_have_their_caches_once() {
    // Keys and values of 16 layers, 8 heads of 64 values.
    let caches = 2 * 16 * 8 * 64 * 2 * 32_768;
    let alone = planned(|options| options.prefill = Some(Vec::new()));
    let several = planned(|options| {
        options.contexts = vec![512, 4096];
        options.shards = 1;
    });
    assert_eq!((alone.contexts[0].graphs.len(), several.contexts[0].graphs.len()), (1, 9));
    for plan in [alone, several] {
        let bytes = plan.contexts[0].io_bytes;
        assert!((caches..caches + caches / 20).contains(&bytes), "{bytes}, caches of {caches}");
    }
}
