"""The operations that a client's program may contain.

The clip bounds a client's influence only if its data affects no other client's update.
So its program may contain only operations that depend on nothing but their arguments
and have no side effects. They are listed here. All others are refused: variables,
queues, writable tables, files, Python, and random numbers from a stream that clients
share.

Not every stateless operation is listed either. Whatever the inputs, the kernel of a
listed operation must return only memory that it wrote, add in a fixed order, and
terminate. The list covers Keras's layers, losses, metrics and optimizers, and little
more. It excludes Cholesky, CropAndResize, MatrixSolveLs and SparseSegmentMeanGrad,
which can return memory that they did not write; Bincount, whose threads add weights in
any order; and AdjustHue, Polygamma and StatelessRandomPoisson, which may never end.
`tests/stress/operations_stress.py` tries each listed operation on synthetic inputs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue, NameAttrList

_ARITHMETIC = """
Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh
BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1
BesselK1e BesselY0 BesselY1 BitwiseAnd BitwiseOr BitwiseXor Cast Ceil ClipByValue
Complex ComplexAbs Conj Cos Cosh Cross Cumprod Cumsum CumulativeLogsumexp Dawsn Digamma
Div DivNoNan Equal Erf Erfc Erfinv Exp Expint Expm1 Floor FloorDiv FloorMod FresnelCos
FresnelSin Greater GreaterEqual Igamma IgammaGradA Igammac Imag Invert IsFinite IsInf
IsNan LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum
Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual PopulationCount Pow Real RealDiv
Reciprocal ReciprocalGrad RightShift Rint Round Rsqrt RsqrtGrad Sigmoid SigmoidGrad Sign
Sin Sinh Spence Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad TruncateDiv
TruncateMod Xdivy Xlog1py Xlogy
"""

_ARRAYS = """
Bucketize ConjugateTranspose DenseBincount Diag DiagPart DynamicPartition EuclideanNorm
InTopKV2 LinSpace LowerBound ReverseSequence Roll ScatterNdNonAliasingAdd
TensorScatterAdd TensorScatterMax TensorScatterMin TensorStridedSliceUpdate TopKV2
Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 UnravelIndex UnsortedSegmentMax
UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum UpperBound Where
"""

_CONTROL_FLOW = """
Case CheckNumerics CheckNumericsV2 If PartitionedCall StatefulPartitionedCall
StatelessCase StatelessIf StatelessWhile While Assert EmptyTensorList
TensorListConcatLists TensorListConcatV2 TensorListElementShape TensorListFromTensor
TensorListGather TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack
TensorListPushBackBatch TensorListReserve TensorListResize
TensorListScatterIntoExistingList TensorListScatterV2 TensorListSetItem TensorListSplit
TensorListStack
"""

_LAYERS = """
AvgPool3D AvgPool3DGrad BatchToSpaceND CTCGreedyDecoder CTCLoss CTCLossV2 Conv
Conv2DBackpropFilterV2 Conv2DBackpropInputV2 Conv3D Conv3DBackpropFilterV2
Conv3DBackpropInputV2 CudnnRNNBackpropV3 CudnnRNNV3 DepthToSpace DepthwiseConv2dNative
DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput
FusedBatchNormGradV3 FusedBatchNormV3 LRN LRNGrad
MaxPool3D MaxPool3DGrad MaxPool3DGradGrad MaxPoolGradGrad MaxPoolGradGradV2
MaxPoolGradV2 MaxPoolV2 MirrorPad MirrorPadGrad SpaceToBatchND SpaceToDepth
"""

_ALGEBRA = """
Eig FFT FFT2D FFT3D FFTND IFFT IFFT2D IFFT3D IFFTND LogMatrixDeterminant Lu
MatrixBandPart MatrixDeterminant MatrixDiagPartV3 MatrixDiagV3 MatrixInverse
MatrixSetDiagV3 MatrixSolve MatrixTriangularSolve Qr RFFT SelfAdjointEigV2 Svd
"""

_IMAGES = """
AdjustContrastv2 AdjustSaturation ExtractImagePatches HSVToRGB
ImageProjectiveTransformV3 RGBToHSV ResizeArea ResizeBicubic ResizeBicubicGrad
ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad
ScaleAndTranslate ScaleAndTranslateGrad
"""

_SPARSE_AND_RAGGED = """
RaggedGather RaggedRange RaggedTensorToTensor SparseCross SparseFillEmptyRows
SparseReorder SparseReshape SparseTensorDenseMatMul SparseToDense
"""

_TEXT = """
AsString ReduceJoin RegexFullMatch RegexReplace StaticRegexFullMatch StaticRegexReplace
StringFormat StringJoin StringLength StringLower StringNGrams StringSplit StringSplitV2
StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong
StringToNumber StringUpper Substr UnicodeDecode UnicodeDecodeWithOffsets UnicodeEncode
UnicodeScript UnicodeTranscode LookupTableFindV2 LookupTableSizeV2
"""

_DECOMPOSITIONS = ("Eig", "SelfAdjointEigV2", "Svd")
# Its threads add weights in any order. That is harmless for counts, which are integers.
_ADDS_IN_ANY_ORDER = "DenseBincount"
# It has two outputs besides its gradients, and writes to neither.
_PARTLY_WRITTEN = "FusedBatchNormGradV3"
_UNWRITTEN = re.compile(r"\^?(.*?):(reserve_space.*|[34])")

# Used by the gradient of a branch that may not have been taken.
_OPTIONAL = "OptionalFromValue OptionalGetValue OptionalHasValue OptionalNone"

# Their seeds are arguments.
_RANDOM = """
RandomGammaGrad StatelessMultinomial StatelessParameterizedTruncatedNormal
StatelessRandomGammaV3 StatelessRandomGetAlg StatelessRandomGetKeyCounter
StatelessRandomNormalV2 StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2
StatelessRandomUniformV2 StatelessSampleDistortedBoundingBox StatelessShuffle
StatelessTruncatedNormalV2
"""

# Operations in which each client reads and writes only its own rows, whatever the data,
# because TensorFlow vectorizes them safely or loops over clients. Segment sums are not
# listed, because an index out of range would reach another client's rows; nor is batch
# normalization, as vectorized, its rounding depends on a client's place among others.
_ARRAYS_BY_CLIENT = """
All Any ArgMax ArgMin Bitcast BroadcastArgs BroadcastGradientArgs BroadcastTo
ConcatOffset ConcatV2 Const DynamicStitch EnsureShape ExpandDims Fill GatherNd GatherV2
Identity IdentityN InvertPermutation L2Loss Max Mean Min NoOp OneHot OnesLike Pack Pad
PadV2 Placeholder PlaceholderWithDefault PreventGradient Prod Range Rank Reshape Reverse
ReverseV2 ScatterNd Select SelectV2 Shape ShapeN Size Slice Snapshot Split SplitV
Squeeze StopGradient StridedSlice StridedSliceGrad Sum TensorScatterSub
TensorScatterUpdate Tile Transpose Unpack ZerosLike
"""

_LAYERS_BY_CLIENT = """
AvgPool AvgPoolGrad BiasAdd BiasAddGrad Conv2D Conv2DBackpropFilter Conv2DBackpropInput
Elu EluGrad LeakyRelu LeakyReluGrad LogSoftmax MaxPool MaxPoolGrad Relu Relu6 Relu6Grad
ReluGrad Selu SeluGrad Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad
Softsign SoftsignGrad SparseSoftmaxCrossEntropyWithLogits BatchMatMulV2 BatchMatMulV3
Einsum MatMul
"""

BY_CLIENT = frozenset(
    " ".join(
        (_ARITHMETIC, _ARRAYS_BY_CLIENT, _LAYERS_BY_CLIENT, _CONTROL_FLOW, _RANDOM)
    ).split()
)

ALLOWED = BY_CLIENT | frozenset(
    " ".join(
        (_ARRAYS, _LAYERS, _ALGEBRA, _IMAGES, _SPARSE_AND_RAGGED, _TEXT, _OPTIONAL)
    ).split()
)

# Further operations in TFF's programs. Each client has its own, fresh variables.
_VARIABLES = """
AssignAddVariableOp AssignSubVariableOp AssignVariableOp ReadVariableOp ResourceGather
ResourceScatterAdd VarHandleOp VarIsInitializedOp VariableShape
"""

# All clients draw from one stream. Only with a known seed would it reveal other draws.
_STREAMS = """
Multinomial ParameterizedTruncatedNormal RandomGamma RandomShuffle RandomStandardNormal
RandomUniform RandomUniformInt TruncatedNormal
"""

IN_TFF = ALLOWED | frozenset((_STREAMS + _VARIABLES).split())


def find_unbatchable(graph_def: tf.compat.v1.GraphDef) -> list[str]:
    """Returns the operations that may mix clients' data when vectorized."""
    functions = {function.signature.name for function in graph_def.library.function}
    operations = {node.op for _, node in nodes(graph_def)}
    return sorted(operations - BY_CLIENT - functions)


def check_compilers() -> None:
    """Raises ValueError if the bits of results may depend on earlier calls.

    With automatic clustering, TensorFlow compiles a program after its first calls.
    Which of two programs trains a client would then depend on the clients before it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if re.search(r"xla_cpu_enable_fast_math(?!=(false|0)\b)", flags):
        raise ValueError(
            "XLA_FLAGS must not set xla_cpu_enable_fast_math, with which a NaN can "
            f"pass for a number and reach the sum, got {flags!r}."
        )
    flags = os.environ.get("TF_XLA_FLAGS", "")
    given = re.search(
        r"tf_xla_(auto_jit(?!=0\b)|cpu_global_jit(?!=(false|0)\b))", flags
    )
    if given or tf.config.optimizer.get_jit():
        raise ValueError(
            "TensorFlow must not compile programs of its own accord, as it does with "
            "TF_XLA_FLAGS=--tf_xla_auto_jit or tf.config.optimizer.set_jit(True), got "
            f"{flags or 'the latter'!r}. Use compile(jit_compile=True) instead."
        )


def check(
    graph_def: tf.compat.v1.GraphDef,
    layers: Iterable[str] = (),
    allow_list: frozenset[str] = ALLOWED,
) -> None:
    """Raises ValueError for an operation that is not allowed.

    Args:
      graph_def: A graph; the functions in its library are checked too.
      layers: Layer names, which the error uses to locate the operation.
      allow_list: The allowed operations.
    """
    check_compilers()
    functions = {function.signature.name for function in graph_def.library.function}
    norm_gradients = {
        node.name for _, node in nodes(graph_def) if node.op == _PARTLY_WRITTEN
    }
    empty_constants = {
        path for path, node in nodes(graph_def) if _is_empty_constant(node)
    }
    for path, node in nodes(graph_def):
        # (Attributes with a leading underscore are notes for TensorFlow's gradients.)
        attributes = (v for name, v in node.attr.items() if not name.startswith("_"))
        called = {call.name for call in calls_in(attributes)}
        missing = called - functions
        # Its internal dropout draws from a stream that clients share.
        draws_dropout = node.op.startswith("CudnnRNN") and node.attr["dropout"].f > 0
        # Outputs that are not requested are unwritten memory.
        is_unwritten = node.op in _DECOMPOSITIONS and not (
            node.attr["compute_v"].b or node.attr["compute_uv"].b
        )
        matches = filter(None, map(_UNWRITTEN.fullmatch, node.input))
        is_unwritten |= any(match[1] in norm_gradients for match in matches)
        scope = path.removesuffix(node.name)
        has_weights = node.op == _ADDS_IN_ANY_ORDER and not (
            {scope + input_name.split(":")[0] for input_name in node.input[2:3]}
            <= empty_constants
        )
        # With a seeded stream, a client's draws depend on how many the others made.
        is_seeded = node.op in _STREAMS.split() and (
            node.attr["seed"].i or node.attr["seed2"].i
        )
        allowed = node.op in allow_list or node.op in functions
        if allowed and not (
            missing or draws_dropout or is_unwritten or has_weights or is_seeded
        ):
            continue
        if node.op == "DebugNumericSummaryV2":
            raise ValueError(
                "tf.debugging must not watch the programs of clients, as it logs what "
                "they compute: call tf.debugging.disable_check_numerics() or "
                "tf.debugging.experimental.disable_dump_debug_info() first."
            )
        raise ValueError(
            "model, loss, metrics, optimizer, mechanism and hooks must compute with "
            "operations that keep nothing for the next client and reach nothing "
            f"outside, got {node.op} in {layer_of(path, layers)} ({path}). Queues, "
            "tables, files and tf.py_function are not allowed. "
            + (
                "In TFF, draw random numbers without a seed (a layer's, or "
                "tf.random.set_seed): with one, all clients draw from one stream. "
                if is_seeded
                else "Draw random numbers with Keras's layers, or with a "
                "keras.random.SeedGenerator that a layer holds and gives as seed=. "
            )
            + "Keep state in the model's weights."
        )


def _is_empty_constant(node: tf.compat.v1.NodeDef) -> bool:
    if node.op != "Const":  # Asking a node for an attribute would give it one.
        return False
    shape = node.attr["value"].tensor.tensor_shape
    return any(not dimension.size for dimension in shape.dim)


def layer_of(path: str, layers: Iterable[str]) -> str:
    """Returns the layer that contains an operation, judging by its name scopes."""
    scopes = {re.sub(r"_\d+$", "", scope) for scope in path.split("/")}
    for layer in reversed(list(layers)):
        if re.sub(r"_\d+$", "", layer) in scopes:
            return f"layer {layer!r}"
    return "the program"


def nodes(
    graph_def: tf.compat.v1.GraphDef,
) -> Iterator[tuple[str, tf.compat.v1.NodeDef]]:
    """Yields the nodes of a graph and its functions, each with its path."""
    for node in graph_def.node:
        yield node.name, node
    for function in graph_def.library.function:
        for node in function.node_def:
            yield f"{function.signature.name}/{node.name}", node


def calls_in(attributes: Iterable[AttrValue]) -> Iterator[NameAttrList]:
    """Yields the functions that attributes name, and those that these name in turn."""
    for value in attributes:
        for call in [value.func] if value.HasField("func") else value.list.func:
            yield call
            yield from calls_in(call.attr.values())
