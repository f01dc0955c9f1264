# SPDX-License-Identifier: Apache-2.0
"""What `quadtree COMMAND --help` says, options apart."""

# \b keeps the lines of the paragraph that follows as they are
INFO_HELP = """Show versions, devices, and which backends can run a call, and why others cannot.

The options describe the call; without them it is one of a feature matcher on 640 x 480 images. With
--plan also its FLOPs, bytes and memory, level by level and next to dense attention, and which of
the two to use. Nothing is run, and the device need not be present.

\b
Examples:
  quadtree info
  quadtree info --plan --grid 200x336 --heads 1 --levels 4 --topk 32
  quadtree info --grid 60x80 --key-grid 45x100 --topk 32,16 --device cuda
  quadtree info --plan --json --grid 4096 --levels 6 --topk 8 --variant A
"""

CONVERT_HELP = """Turn an official checkpoint into weights for this package.

Reads classification, detection and segmentation checkpoints, also whole detectors and segmenters,
of which it takes the backbone, and matchers: LoFTR and its quadtree form. Code in the file is never
run, and every tensor of the backbone or matcher is accounted for. Writes OUT.safetensors, and
beside it OUT.json, which says what it is.

\b
Examples:
  quadtree convert quadtree_b2.pth -o b2.safetensors
  quadtree convert retinanet.pth -o b1_det.safetensors --json
  quadtree convert mine.pth -o mine.safetensors --model quadtree_b_b2 --act gelu --topk 16
  quadtree convert quadtree_b2.pth -o b2_features.safetensors --num-classes 0 --force
  quadtree convert indoor.ckpt -o indoor.safetensors --model loftr_quadtree_indoor
"""

TRAIN_HELP = """Train a model from a recipe file.

TASK is classify, match, stereo, detect or segment. All options of a recipe can be given on the
command line as well, and override it: quadtree train TASK --help lists them. Ctrl-C or a kill loses
at most --save_every steps; go on with --resume. Writes last.ckpt, best.ckpt, best.safetensors,
history.csv and curves.png to --run_dir.

\b
Examples:
  quadtree train classify --config recipes/classify/debug.yaml
  quadtree train classify --config recipes/classify/imagenet.yaml --variant b2 --data.root imagenet
  quadtree train classify --config recipes/classify/imagenet.yaml --variant b2 --resume
  quadtree train classify --config my.yaml --trainer.devices 8 --trainer.num_nodes 2
"""

MATCH_HELP = """Find what two images have in common, and how the camera moved.

A and B are images of any size and kind. Points are (x, y) pixels of the images as they are seen,
that is, turned as their EXIF tag says. --out draws the matches, --save writes keypoints0,
keypoints1 and confidence as npz; without either, and without --json, the picture goes to
matches.png. With --K0 and --K1, each fx,fy,cx,cy or 9 numbers or a text file with them, the
relative pose is printed, by two estimators. Weights come with the package.

--pairs matches many: every line of the file names two images in --images, as in SuperGlue's files
(image0 image1 [rotation0 rotation1 [K0 K1 [T_0to1]]]), and gets one STEM0__STEM1.npz in --save-dir.
A rotation turns the image by so many quarters counter-clockwise first, and points are pixels of the
turned image. Pairs that are there already are skipped. An image that cannot be read is named at the
end, the others are matched, and the exit code is 1.

\b
Examples:
  quadtree match a.jpg b.jpg
  quadtree match a.jpg b.jpg --out matches.jpg --save matches.npz --size 1024 --threshold 0.5
  quadtree match a.jpg b.jpg --K0 1165,1165,649,484 --K1 camera1.txt
  quadtree match a.jpg b.jpg --json --max 500 > matches.json
  quadtree match --pairs pairs.txt --images photos --save-dir OUT --device cuda
"""

CLASSIFY_HELP = """Tell what images show, with a trained classifier.

An IMAGE is a file, a folder, which stands for the images in it, or - for a file on standard input.
WEIGHTS are best.safetensors of a training run, or what quadtree convert has written; the names of
the classes come from their card. An image that cannot be read gets a line on standard error, the
others are classified, and the exit code is 1.

\b
Examples:
  quadtree classify cat.jpg --weights runs/imagenet-b2/best.safetensors
  quadtree classify photos/ --weights b2.safetensors --top 1
  quadtree classify photos/*.png --weights b2.safetensors --json > answers.json
  curl -s https://example.org/cat.jpg | quadtree classify - --weights b2.safetensors
"""

EVALUATE_HELP = """Measure how well trained models do.

The model runs once and its answers are kept in a file; the numbers are worked out from that file,
and can be again without the model. quadtree evaluate TASK --help tells more.
"""

EVALUATE_CLASSIFY_HELP = """Measure the accuracy of a classifier on labelled images.

ROOT holds a folder per split and in it one per class (val/cat/1.jpg), or an npz file per split.
Classes are matched with those of WEIGHTS by name. The answers go to --out; if that file is there
and was made from the same weights, images and settings, it is used and the model does not run.
With --predictions such a file is scored, and nothing else is needed. Images that cannot be read are
named on standard error, counted and left out.

\b
Examples:
  quadtree evaluate classify runs/imagenet-b2/best.safetensors --data imagenet
  quadtree evaluate classify b2.safetensors --data imagenet --size 288 --dtype bfloat16 --force
  quadtree evaluate classify b2.safetensors --data pets --split test --out pets.npz --strict
  quadtree evaluate classify --predictions pets.npz --json
"""

EVALUATE_MATCH_HELP = """Score matches in files against true poses and homographies.

PAIRS lists pairs of images, one to a line, in the format of SuperGlue: image0 image1 rotation0
rotation1 K0 K1 T_0to1 for a pose, or image0 image1 and 9 numbers of a homography. OUT is a folder
that quadtree match --pairs PAIRS --save-dir OUT has filled, or another program in the same way:
STEM0__STEM1.npz per pair, with keypoints0, keypoints1 and confidence. A pair without such a file
counts as failed.

Shows the area under the curve of recall over error (AUC), for poses up to 5, 10 and 20 degrees,
for the corners of homographies up to 3, 5 and 10 pixels, the median error, the share of correct
matches and their number; AUC always with two estimators, as the choice can move it by more than a
better matcher does.

\b
Examples:
  quadtree evaluate match --pairs pairs.txt --predictions OUT
  quadtree evaluate match --pairs graf.txt --predictions OUT --images graf --json
  quadtree evaluate match --pairs outdoor.txt --predictions OUT --epipolar 1e-4 --out scores.json
"""

STEREO_HELP = """Tell how near everything is, from a left and a right image.

LEFT and RIGHT are a rectified pair of the same size, of any kind. What is at (x, y) on the left is
at (x - disparity, y) on the right; disparities are in pixels of the images as given. --out draws
them in colours, with what the right image does not show hatched, --save writes the numbers, as
.npy, .pfm or 16-bit .png (times 256), --occlusion writes a grey picture, white where hidden;
without any of these, and without --json, the picture goes to disparity.png. With --focal, in
pixels, and --baseline, in any unit, depth is printed, and --depth writes it. A pair that looks
swapped or not rectified gets a warning on standard error. Weights come with the package.

LEFT and RIGHT may be folders, whose images are paired by equal names, or by names that differ only
by left and right, l and r, 0 and 1 or 2 and 3. Every pair gets NAME.npz, with disparity and
occlusion (or what --format says), and a picture NAME.jpg in --save-dir. Pairs that are there
already are skipped. What cannot be read is named at the end, the others are done, and the exit code
is 1.

\b
Examples:
  quadtree stereo left.png right.png
  quadtree stereo left.png right.png --out near.jpg --save disparity.pfm --max-disparity 128
  quadtree stereo left.png right.png --depth depth.npy --focal 994.98 --baseline 193 --offset 31
  quadtree stereo image_2 image_3 --save-dir OUT --format png --device cuda
"""

EVALUATE_STEREO_HELP = """Measure how good disparities are on pairs with true ones.

ROOT is a folder of pairs in any layout that quadtree train stereo reads: left/, right/ and
disparity/, Middlebury's, KITTI's or Scene Flow's, also several below each other. WEIGHTS are those
of the package if left out. Disparities go to --out, one npz per pair; pairs that are there, made
from the same weights and options, are used as they are. With --predictions such a folder is scored,
and no network is needed; it may also come from another program, as NAME.npy, .pfm or 16-bit .png.

Shows the mean error (EPE), the share of errors above 1, 2 and 3 pixels and that above 3 pixels and
5 % (D1), of what both views see and of all known pixels, and how well occlusion is told (IoU).

\b
Examples:
  quadtree evaluate stereo --data KITTI_2015 --out kitti
  quadtree evaluate stereo runs/sceneflow/best.safetensors --data SCENE_FLOW --out OUT --json
  quadtree evaluate stereo --predictions OUT --data SCENE_FLOW --scores scores.json
"""

SEGMENT_HELP = """Tell for every pixel of images what it shows.

Draws every image in the colours of its classes, with a legend: --out, a file for one image, a
folder for more. --save writes label maps, PNG files whose pixels are numbers of classes. A folder
stands for the images in it, - for standard input. Images that cannot be read are named and left
out, and the exit code is 1.

--weights takes best.safetensors of quadtree train segment. Images that are too large for memory:
--window lets a window slide over them.

\b
Examples:
  quadtree segment street.jpg --weights best.safetensors
  quadtree segment street.jpg --weights best.safetensors --out street.png --save labels.png
  quadtree segment photos --weights best.safetensors --out pictures --save labels
  quadtree segment huge.jpg --weights best.safetensors --window 512 --stride 384
  quadtree segment street.jpg --weights best.safetensors --json
"""

EVALUATE_SEGMENT_HELP = """Measure a segmenter: mIoU, IoU of every class, pixel accuracy.

Writes a label map for every image to --out first, beside a settings.json, and then scores the
files. Label maps that are there are kept if the settings are the same; --predictions scores those
of any program. ROOT has images/SPLIT, labels/SPLIT and classes.json, or is ADE20K.

\b
Examples:
  quadtree evaluate segment best.safetensors --data camvid11
  quadtree evaluate segment best.safetensors --data camvid11 --window 320 --out sliding --json
  quadtree evaluate segment --predictions sliding --data camvid11
"""

DETECT_HELP = """Find objects in images, with a trained detector.

An IMAGE is a file, a folder, which stands for the images in it, or - for a file on standard input.
WEIGHTS are best.safetensors of quadtree train detect; the names of the classes come from their
card. Boxes, and masks where the model has them, are drawn: for one image to detections.png, for
several into the folder detections, or to --out. Boxes are x0, y0, x1, y1 in pixels of the image as
it is seen, that is, turned as its EXIF tag says. With --json nothing is drawn unless --out is
given. An image that cannot be read gets a line on standard error, the others are looked at, and
the exit code is 1.

\b
Examples:
  quadtree detect street.jpg --weights runs/coco-retinanet-b2-1x/best.safetensors
  quadtree detect photos/ --weights best.safetensors --out found --score 0.3
  quadtree detect photos/*.png --weights best.safetensors --json > objects.json
"""

EVALUATE_DETECT_HELP = """Measure the average precision (AP) of a detector by COCO's rules.

ROOT holds images/val and annotations/instances_val.json, or COCO's own val2017 and
annotations/instances_val2017.json. Classes are matched with those of WEIGHTS by name. What is found
goes to --out in COCO's result format, and how it was made to OUT.settings.json beside it; if they
are there and were made from the same weights, images and settings, the model does not run. With
--predictions such a file, of this program or another, is scored. Broken annotations and images are
named on standard error and counted.

\b
Examples:
  quadtree evaluate detect runs/coco-retinanet-b2-1x/best.safetensors --data coco
  quadtree evaluate detect best.safetensors --data bccd --out bccd.json --size 640 --force
  quadtree evaluate detect --predictions bccd.json --data bccd --json
"""
