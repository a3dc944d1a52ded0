/* Copies slots between two pools in one launch, whatever the order of their dimensions.
 *
 *   pool        [slot, layer, bytes] by strides: layer first and page first are the same code
 *   segment     one layer of one slot: layer_bytes in a row on both sides
 *   warp        takes a segment, 32 x 16 bytes a step; what is left over goes byte by byte
 *
 * Consecutive segments are consecutive layers of one slot, so on the page-first side (host memory that is mapped
 * into the device) a block reads or writes one long run.
 *
 * Plain C on purpose: the tests compile this file for the CPU and run it there.
 */
#ifdef __cplusplus
extern "C" {
#endif

__global__ void copy_pages(
    const unsigned char *source, unsigned char *target, const long long *source_slots, const long long *target_slots,
    long long num_slots, long long num_layers, long long layer_bytes, long long source_slot_stride,
    long long source_layer_stride, long long target_slot_stride, long long target_layer_stride)
{
    const long long lane = threadIdx.x % 32;
    const long long num_warps = (long long)gridDim.x * (blockDim.x / 32);
    const long long num_segments = num_slots * num_layers;
    long long segment = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;

    for (; segment < num_segments; segment += num_warps) {
        const long long slot = segment / num_layers;
        const long long layer = segment - slot * num_layers;
        const unsigned char *from = source + source_slots[slot] * source_slot_stride + layer * source_layer_stride;
        unsigned char *to = target + target_slots[slot] * target_slot_stride + layer * target_layer_stride;
        long long done = 0;

        if ((((unsigned long long)from | (unsigned long long)to) & 15) == 0) {
            const long long num_words = layer_bytes / 16;
            for (long long word = lane; word < num_words; word += 32)
                ((uint4 *)to)[word] = ((const uint4 *)from)[word];
            done = num_words * 16;
        }
        for (long long byte = done + lane; byte < layer_bytes; byte += 32)
            to[byte] = from[byte];
    }
}

#ifdef __cplusplus
}
#endif
