#![allow(clippy::unwrap_used)]

use super::*;
use crate::window::WindowTable;

const NS: Namespace = Namespace(1);

/// A request of whole blocks of two tokens, with a table for each window group.
struct Request {
    tokens: Vec<u32>,
    full: Vec<BlockId>,
    windows: Vec<WindowTable>,
    shadows: Vec<BlockId>,
    cursor: Cursor,
}

impl Request {
    /// Takes what is cached and usable, and allocates the rest in every group.
    fn start(cache: &mut KvCache, tokens: &[u32]) -> Self {
        let cursor = usable(cache, tokens);
        let (mut full, mut new) = (Vec::new(), Vec::new());
        cache.take_match(cursor, &mut full);
        let mut windows = cache.take_windows(cursor);
        let missing = tokens.len() as u32 / 2 - cursor.depth();
        assert!(cache.allocate(missing, &mut full));
        for table in &mut windows {
            assert!(cache.allocate(missing, &mut new));
            new.drain(..).for_each(|block| table.push(block));
        }
        Self {
            tokens: tokens.to_vec(),
            full,
            windows,
            shadows: vec![],
            cursor,
        }
    }

    fn publish(&mut self, cache: &mut KvCache) {
        let first = self.cursor.depth();
        let (tokens, blocks) = (
            &self.tokens[first as usize * 2..],
            &self.full[first as usize..],
        );
        cache.publish(NS, &mut self.cursor, tokens, blocks, &mut self.shadows);
        cache.attach_windows(self.cursor, first, &self.windows);
    }

    /// Gives back the window blocks before `column`.
    fn slide(&mut self, cache: &mut KvCache, column: u32) {
        let mut blocks = Vec::new();
        for table in &mut self.windows {
            table.drop_before(column, &mut blocks);
        }
        cache.release(&blocks);
    }

    fn finish(mut self, cache: &mut KvCache) {
        self.slide(cache, u32::MAX);
        cache.release(&self.full);
        cache.release(&self.shadows);
    }

    fn run(cache: &mut KvCache, tokens: &[u32]) {
        let mut request = Self::start(cache, tokens);
        request.publish(cache);
        check(cache, &[&request]);
        request.finish(cache);
        check(cache, &[]);
    }
}

fn usable(cache: &KvCache, tokens: &[u32]) -> Cursor {
    let mut cursor = cache.root(NS);
    cache.extend_match(NS, &mut cursor, tokens, u32::MAX);
    cache.usable_match(cursor)
}

fn check(cache: &KvCache, requests: &[&Request]) {
    let lists = requests.iter().flat_map(|request| {
        let windows = request.windows.iter().flat_map(WindowTable::parts);
        windows.chain([&request.full[..], &request.shadows[..]])
    });
    cache.check_integrity(lists).unwrap();
}

/// Windows of 5 and 2 positions: the first query behind a hit reads two columns before it, or one.
fn cache(num_blocks: u32) -> KvCache {
    KvCache::with_windows(num_blocks, 2, true, [5, 2])
}

fn tokens(blocks: u32) -> Vec<u32> {
    (0..2 * blocks).collect()
}

#[test]
fn a_hit_ends_where_every_group_has_what_a_query_reads() {
    // Which columns have a companion in each of the two groups, and the longest hit.
    let cases = [
        ("111111", "111111", 6),
        ("000011", "000001", 6),
        ("000001", "000001", 0),
        ("110111", "111111", 6),
        ("111101", "111111", 4),
        ("111101", "110111", 4),
        ("111101", "110011", 2),
        ("111110", "111101", 4),
        ("011110", "111111", 5),
        ("010110", "100111", 5),
        ("010100", "100111", 0),
        ("100000", "100000", 1),
        ("000000", "000000", 0),
    ];
    for (first, second, expected) in cases {
        let mut cache = cache(40);
        let mut request = Request::start(&mut cache, &tokens(6));
        request.publish(&mut cache);
        request.finish(&mut cache);
        for (group, columns) in [first, second].into_iter().enumerate() {
            let mut cursor = cache.root(NS);
            cache.extend_match(NS, &mut cursor, &tokens(6), u32::MAX);
            let nodes: Vec<BlockId> = cache.path(cursor).collect();
            for (node, has) in nodes.iter().rev().zip(columns.chars()) {
                if has == '0' {
                    let companion = cache.companions.get(*node, group).unwrap();
                    cache.evict_companion(companion);
                }
            }
        }
        check(&cache, &[]);
        assert_eq!(
            usable(&cache, &tokens(6)).depth(),
            expected,
            "{first} {second}"
        );
    }
}

#[test]
fn a_hit_takes_the_companions_that_a_query_reads_and_no_more() {
    let mut cache = cache(40);
    Request::run(&mut cache, &tokens(4));
    let cursor = usable(&cache, &tokens(4));
    assert_eq!(
        (cache.num_evictable(), cache.matched_evictable(cursor)),
        (12, 4 + 2 + 1)
    );
    let request = Request::start(&mut cache, &tokens(4));
    let columns: Vec<_> = request
        .windows
        .iter()
        .map(|table| (table.first(), table.end()))
        .collect();
    assert_eq!(columns, [(2, 4), (3, 4)]);
    assert_eq!(
        (cache.num_evictable(), cache.matched_evictable(cursor)),
        (5, 0)
    );
    check(&cache, &[&request]);
}

#[test]
fn what_left_the_window_goes_before_any_prefix_and_its_node_stays() {
    let mut cache = cache(13);
    let mut request = Request::start(&mut cache, &tokens(4));
    request.publish(&mut cache);
    request.slide(&mut cache, 2);
    check(&cache, &[&request]);
    assert_eq!((cache.num_free(), cache.num_evictable()), (0, 4));
    let version = cache.version();
    assert!(cache.allocate(4, &mut Vec::new()));
    assert!(
        cache.version() > version,
        "a match may be shorter without a companion"
    );
    assert_eq!(usable(&cache, &tokens(4)).depth(), 4);
    assert_eq!(usable(&cache, &tokens(3)).depth(), 0);
    assert!(!cache.allocate(1, &mut Vec::new()));
}

#[test]
fn a_prompt_goes_as_a_whole_before_one_that_was_used_later() {
    let mut cache = cache(25);
    let other: Vec<u32> = (100..108).collect();
    Request::run(&mut cache, &tokens(4));
    Request::run(&mut cache, &other);
    for evicted in 1..=12 {
        assert!(cache.allocate(1, &mut Vec::new()));
        assert_eq!(usable(&cache, &other).depth(), 4, "{evicted} evicted");
    }
    assert_eq!(cache.num_cached(), 12);
    assert_eq!(usable(&cache, &tokens(4)).depth(), 0);
}

#[test]
fn a_duplicate_gives_its_window_blocks_to_a_node_that_lost_its_own() {
    let mut cache = cache(40);
    Request::run(&mut cache, &tokens(4));
    // All companions go.
    let mut taken = Vec::new();
    assert!(cache.allocate(cache.num_free() + 8, &mut taken));
    cache.release(&taken);
    assert_eq!(
        (cache.num_cached(), usable(&cache, &tokens(4)).depth()),
        (4, 0)
    );
    let version = cache.version();
    let mut request = Request::start(&mut cache, &tokens(4));
    request.publish(&mut cache);
    check(&cache, &[&request]);
    assert_eq!(
        request.shadows.len(),
        4,
        "its own blocks of the full group stay private"
    );
    assert!(cache.version() > version);
    assert_eq!(
        (cache.num_cached(), usable(&cache, &tokens(4)).depth()),
        (12, 4)
    );
    request.finish(&mut cache);
    check(&cache, &[]);
    assert_eq!(cache.num_evictable(), 12);
}

#[test]
fn a_companion_that_nobody_uses_is_replaced_and_one_in_use_is_not() {
    let mut cache = cache(40);
    let mut first = Request::start(&mut cache, &tokens(4));
    let mut second = Request::start(&mut cache, &tokens(4));
    first.publish(&mut cache);
    first.slide(&mut cache, 2);
    let free = cache.num_free();
    second.publish(&mut cache);
    check(&cache, &[&first, &second]);
    assert_eq!(
        cache.num_free(),
        free + 4,
        "two columns of two groups existed twice"
    );
    let in_tree = |table: &WindowTable| {
        let blocks: Vec<_> = table.blocks().collect();
        blocks
            .iter()
            .filter(|&&block| cache.ref_count(block) == 2)
            .count()
    };
    assert_eq!(
        first.windows.iter().map(in_tree).collect::<Vec<_>>(),
        [2, 2]
    );
    assert_eq!(
        second.windows.iter().map(in_tree).collect::<Vec<_>>(),
        [2, 2]
    );
}

#[test]
fn a_clear_frees_companions_that_only_the_tree_holds() {
    let mut cache = cache(40);
    Request::run(&mut cache, &tokens(4));
    let mut request = Request::start(&mut cache, &tokens(6));
    request.publish(&mut cache);
    cache.clear();
    check(&cache, &[&request]);
    // 6 columns, and from the first group's second column on, the second group's third.
    assert_eq!(cache.num_free(), 39 - 6 - 4 - 3);
    request.finish(&mut cache);
    assert_eq!((cache.num_free(), cache.num_cached()), (39, 0));
}

#[test]
fn integrity_notices_a_companion_out_of_place() {
    type Damage = fn(&mut KvCache, &mut Request);
    let damages: [(&str, Damage); 4] = [
        ("outlives its node", |cache, request| {
            // Its node was given back before it.
            let last = request.windows[0].get(3).unwrap();
            cache.retain(&[last]);
            for part in request.windows.iter().flat_map(WindowTable::parts) {
                cache.release(part);
            }
            request.windows.clear();
            cache.release(&request.full);
            request.full.clear();
            cache.release(&[last]);
        }),
        ("has is_idle = false, its node", |cache, request| {
            // Holds a companion, not its node.
            cache.release(&request.full);
            request.full.clear();
        }),
        ("does not know its companion", |cache, request| {
            let node = request.full[0];
            let other = request.windows[0].get(1).unwrap();
            cache.companions.insert(node, 0, other);
        }),
        ("has count 3, 2 references", |cache, request| {
            let block = request.windows[0].get(1).unwrap();
            cache.pool.retain(block);
        }),
    ];
    for (expected, damage) in damages {
        let mut cache = cache(40);
        let mut request = Request::start(&mut cache, &tokens(4));
        request.publish(&mut cache);
        check(&cache, &[&request]);
        damage(&mut cache, &mut request);
        let lists = request.windows.iter().flat_map(WindowTable::parts);
        let error = cache.check_integrity(lists.chain([&request.full[..]]));
        let error = error.expect_err(expected);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}
