#![allow(clippy::unwrap_used)]

use super::*;

const NS: [Namespace; 2] = [Namespace(1), Namespace(2)];

/// Inserts one block per token, each of one token, below the root or what is there already. Returns the last.
fn insert(tree: &mut RadixTree, ns: Namespace, tokens: &[u32], blocks: &[u32]) {
    let mut cursor = tree.root(ns);
    let mut blocks = blocks.iter().map(|&id| BlockId(id));
    for token in tokens.chunks(1) {
        let block = tree.child(cursor, token).unwrap_or_else(|| {
            let block = blocks.next().unwrap();
            tree.insert(cursor, token, block);
            block
        });
        cursor = tree.step(cursor, block);
    }
    assert_eq!(blocks.next(), None);
}

fn find(tree: &RadixTree, ns: Namespace, tokens: &[u32]) -> Option<BlockId> {
    let cursor = tokens.chunks(1).try_fold(tree.root(ns), |cursor, token| {
        Some(tree.step(cursor, tree.child(cursor, token)?))
    });
    cursor.map(|cursor| cursor.block)
}

/// Two namespaces; in the first, block 2 continues 1, and 3 and 4 are branches of it.
fn small_tree(num_buckets: u32) -> RadixTree {
    let mut tree = RadixTree::with_buckets(9, 1, num_buckets);
    insert(&mut tree, NS[0], &[7, 1], &[1, 2]);
    insert(&mut tree, NS[0], &[7, 2], &[3]);
    insert(&mut tree, NS[0], &[7, 3], &[4]);
    insert(&mut tree, NS[1], &[7, 1], &[5, 6]);
    tree
}

#[test]
fn keys_that_all_collide_are_told_apart_by_parent_namespace_and_tokens() {
    let mut tree = small_tree(1);
    insert(&mut tree, NS[1], &[7, 9], &[8]);
    let expected = [
        (0, 1, Some(2)),
        (0, 2, Some(3)),
        (0, 3, Some(4)),
        (0, 4, None),
        (1, 1, Some(6)),
        (1, 2, None),
    ];
    for (ns, token, block) in expected {
        assert_eq!(find(&tree, NS[ns], &[7, token]), block.map(BlockId));
    }
    assert_eq!(find(&tree, Namespace(3), &[7]), None);
    // From the middle, the end and the start of the one chain there is.
    for (block, parent) in [(3, 1), (6, 5), (8, 5), (4, 1), (2, 1), (1, 0), (5, 0)] {
        assert!(tree.is_leaf(BlockId(block)));
        assert_eq!(tree.remove_leaf(BlockId(block)), BlockId(parent));
        assert_eq!(tree.check(|_| false), Ok(0));
    }
    assert_eq!(tree.num_cached(), 0);
}

#[test]
fn a_continuation_that_was_removed_is_replaced_while_its_branches_stay() {
    let mut tree = small_tree(16);
    tree.remove_leaf(BlockId(2));
    insert(&mut tree, NS[0], &[7, 9], &[8]);
    assert_eq!(tree.node(BlockId(1)).next, BlockId(8));
    assert_eq!(find(&tree, NS[0], &[7, 3]), Some(BlockId(4)));
    assert_eq!(find(&tree, NS[0], &[7, 1]), None);
    assert_eq!(tree.check(|_| false), Ok(0));
}

#[test]
fn no_namespace_leaves_anything_behind() {
    let mut tree = RadixTree::new(3, 1);
    for ns in 0..100 {
        insert(&mut tree, Namespace(ns), &[1, 2], &[1, 2]);
        tree.remove_leaf(BlockId(2));
        tree.remove_leaf(BlockId(1));
    }
    assert!(tree.buckets.iter().all(|&head| head == BlockId::NULL));
    assert_eq!(tree.node(BlockId::NULL).num_branches, 0);
}

#[test]
fn an_idle_block_counts_as_reachable_only_if_all_below_it_is_idle() {
    let mut tree = small_tree(16);
    for id in [1, 2, 3, 5] {
        tree.set_idle(BlockId(id), 1);
    }
    assert_eq!(
        tree.check(|block| [1, 2, 3, 5].contains(&block.0)),
        Ok(2),
        "4 and 6 are in use"
    );
}

#[test]
fn idle_leaves_come_by_last_use_then_by_id() {
    let mut tree = small_tree(16);
    for (id, now) in [(6, 1), (3, 2), (4, 1), (2, 2), (1, 0)] {
        tree.set_idle(BlockId(id), now);
    }
    tree.set_used(BlockId(2));
    let order = std::iter::from_fn(|| tree.pop_idle_leaf()).map(|block| block.0);
    assert_eq!(
        order.collect::<Vec<_>>(),
        [4, 6, 3],
        "1 is no leaf, 2 is in use"
    );
}

#[test]
fn check_notices_each_kind_of_damage() {
    type Damage = fn(&mut RadixTree);
    let damages: [(&str, Damage); 10] = [
        ("num_cached is 7", |tree| tree.num_cached += 1),
        ("share a stamp", |tree| {
            tree.nodes[2].stamp = tree.nodes[3].stamp
        }),
        ("parent 8 of block 2 is not in the tree", |tree| {
            tree.nodes[2].parent = BlockId(8)
        }),
        ("2 of 6 cached blocks can be reached", |tree| {
            tree.nodes[1].parent = BlockId(2)
        }),
        ("continued by 6, which is no child", |tree| {
            tree.nodes[1].next = BlockId(6)
        }),
        ("block 1 counts 3 branches", |tree| {
            tree.nodes[1].num_branches = 3
        }),
        ("sibling with the same tokens", |tree| tree.tokens[2] = 2),
        ("but no branch, or there twice", |tree| {
            tree.buckets[0] = BlockId(2)
        }),
        ("its key in another", |tree| tree.buckets.rotate_left(1)),
        ("has 0 of 4 branches", |tree| {
            tree.buckets.fill(BlockId::NULL)
        }),
    ];
    for (expected, damage) in damages {
        let mut tree = small_tree(16);
        assert_eq!(tree.check(|_| false), Ok(0));
        damage(&mut tree);
        let error = tree.check(|_| false).expect_err(expected);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}
